"""The web console of a run without its Redis: charts, samples, ledger, checkpoints and configuration from the run's folder
alone.

Guarantees: nothing is written; what only Redis knew (the replay table, plans, dead letters) is answered with 503 and the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

from fastapi import APIRouter, HTTPException
from fastapi import Path as InPath

from services.config import RunConfig
from services.operations.history import EVALUATED, STEP, history_of
from services.operations.inspection.ledger import AuditReport, audit_of_end
from services.operations.inspection.step import Step
from services.operations.observe import Poll
from services.protocol.errors import StoreError
from services.runtime.checkpoints import CheckpointFolder
from services.runtime.service import Service
from services.store import RunState, Store
from services.web import series
from services.web.files import METRICS
from services.web.watch import Describe, Watch

WHY = "the run's Redis is gone, and the folder does not contain this"


class GoneStore:
    """Stands in for a store: every call raises `StoreError`."""

    def __getattr__(self, name: str) -> GoneStore:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    async def __call__(self, *_: Any, **__: Any) -> Any:
        """Raise `StoreError`."""
        raise StoreError(WHY)


class FolderWatch(Watch):
    """The run in its last state, according to its files."""

    def __init__(self, config: RunConfig, folder: Path, describe: Describe) -> None:
        super().__init__(cast("Store", GoneStore()), config.fleet.ttl_s, None, describe)
        self._config, self._folder = config, folder
        self._files = folder / METRICS, folder / "evaluations.jsonl"
        self._read_s: tuple[float, ...] = ()

    async def poll(self, progress: Callable[[], None] = lambda: None) -> None:
        """Read the files if they have changed."""
        async with self._once:
            changed_s = tuple(file.stat().st_mtime if file.exists() else 0.0 for file in self._files)
            if changed_s != self._read_s:
                self.steps = await asyncio.to_thread(history_of, self._files[0], STEP, series.keep)
                self.rounds = await asyncio.to_thread(history_of, self._files[1], EVALUATED, dict[str, Any])
                self.rounds.outlive(self.steps)
                self._read_s = changed_s
                self._observer.last = Poll(state=self._state())
            self._polled_at = max(changed_s)

    def _state(self) -> RunState:
        step = max(self.steps.rows, default=-1)
        saved = [one.step for one in CheckpointFolder(self._folder / "checkpoints").complete()]
        state = RunState(
            steps=self._config.run.steps,
            slots=self._config.slots,
            slots_used=0,
            cursor=0,
            published_version=step + 1,
            prepared_step=step,
            committed_step=step,
            checkpointed_step=max(saved, default=-1),
            leader="",
            paused={},
            stopping="",
            finished="",
            dataset="",
            config="",
            incarnation=int(self.steps.incarnation),
        )
        found = self._describe(state)
        return replace(state, finished=found.detail or found.word) if found.word == "finished" else state


def folder_router(service: Service, folder: Path) -> APIRouter:
    """Return the router of those endpoints of a run that its folder can answer, too."""
    router = APIRouter(prefix="/v1", tags=["folder"], dependencies=[service.app.state.reader])

    @router.get("/audit")
    async def audited() -> AuditReport:
        """Return the audit of the run's end."""
        if (found := audit_of_end(folder)) is None:
            raise HTTPException(503, "the run has no summary.json: it did not end properly, and its Redis is gone")
        return found

    @router.get("/steps/{n}")
    async def step(n: Annotated[int, InPath(ge=0, le=2**31)]) -> Step:
        """Return a step's metrics."""
        history = await asyncio.to_thread(history_of, folder / METRICS, STEP, _numbers)
        if (found := history.rows.get(n)) is None:
            raise HTTPException(404, f"step {n} is not in metrics.jsonl")
        return Step(step=n, state="retired", plan=None, record=found)

    return router


def _numbers(record: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: value for name, value in record.items() if isinstance(value, int | float | None)}
