"""Endpoints for the contents of a run's folder: its account, its configuration, and the curves of neighbouring runs.

Guarantees: files are read on a thread; another run is one of the folders next to this run's, never a path given by the caller.
"""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query
from fastapi import Path as InPath
from pydantic import BaseModel, ConfigDict

from services.config import RunConfig
from services.config.explain import keys
from services.config.secrets import without_secrets
from services.operations.cost import Cost, cost_of
from services.operations.history import STEP, history_of
from services.runtime.atomic_folders import FolderError
from services.runtime.service import Service
from services.web import series

METRICS = "metrics.jsonl"
ACCOUNT_S = 15.0
NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$"
NO_ACCOUNT = (
    "This run has no account yet. The tracker writes it; the tracker runs unless samples.keep is 0 and no tracker is configured."
)


class OtherRuns(BaseModel):
    """Runs whose folders are next to this run's own."""

    runs: list[str]


class OtherSeries(BaseModel):
    """Data of another run's charts: one column per metric, each as long as `steps`."""

    run: str
    steps: list[int]
    columns: dict[str, list[float | None]]


class CostReport(BaseModel):
    """How the run's device time was spent (docs/cost.md)."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    spent: dict[str, float]
    """Outcome or activity -> device-seconds; their sum is the time for which devices were held."""
    trainer: dict[str, float]
    generator: dict[str, float]
    yields: dict[str, float]
    """What the run has produced: unit, such as "a solved prompt" -> number."""
    note: str = ""
    """Which units are left out because the sample log is not complete, and why; empty: none."""
    divided: bool
    """Whether the time of generation is divided by outcome, which needs the sample log."""
    missing: str
    """Why there is no account; empty: there is one."""


class ConfigurationKey(BaseModel):
    """A key of the run's configuration."""

    key: str
    value: Any
    changed: bool
    """Whether it is not the default."""
    help: str


class ConfigurationReport(BaseModel):
    """The configuration as the services read it."""

    keys: list[ConfigurationKey]


class Accounts:
    """The account of a run, which takes reading all of its log: once in `ACCOUNT_S`, whatever the number of readers."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, asyncio.Lock()
        self._found: Cost | None = None
        self._read_s = -math.inf

    async def current(self) -> Cost | None:
        """Return the account, at most `ACCOUNT_S` old; None: there is none yet. Raises `FolderError` if it cannot be read."""
        async with self._lock:
            if self._found is None or time.monotonic() - self._read_s > ACCOUNT_S:
                self._found = await asyncio.to_thread(cost_of, self._folder)
                self._read_s = time.monotonic()
            return self._found


def files_router(service: Service) -> APIRouter:
    """Return the router of these endpoints."""
    router = APIRouter(prefix="/v1/console", tags=["console"], dependencies=[service.app.state.reader])
    folder, accounts = service.folder, Accounts(service.folder)

    @router.get("/account")
    async def account() -> CostReport:
        """Return the run's account by outcome."""
        try:
            found, missing = await accounts.current(), NO_ACCOUNT
        except FolderError as error:
            found, missing = None, str(error)
        if found is None:
            return CostReport(spent={}, trainer={}, generator={}, yields={}, divided=False, missing=missing)
        known = {name: getattr(found, name) for name in ("spent", "trainer", "generator", "yields", "note")}
        return CostReport(**known, divided=bool(found.tokens), missing="")

    @router.get("/configuration")
    async def configuration() -> ConfigurationReport:
        """Return every key of the configuration with its value."""
        return ConfigurationReport(keys=configuration_keys(service.config))

    @router.get("/runs")
    async def runs() -> OtherRuns:
        """List the runs next to this one, by name."""
        return OtherRuns(runs=await asyncio.to_thread(_beside, folder))

    @router.get("/runs/{name}/series", summary="Series of another run")
    async def other(
        name: Annotated[str, InPath(pattern=NAME)], points: Annotated[int, Query(ge=1, le=series.MOST_POINTS)] = 400
    ) -> OtherSeries:
        """Return the charted metrics of another run, in at most `points` points."""
        if name not in await asyncio.to_thread(_beside, folder):
            raise HTTPException(404, f"there is no run {name!r} with metrics next to this one")
        history = await asyncio.to_thread(history_of, folder.parent / name / METRICS, STEP, series.keep)
        steps, columns = await asyncio.to_thread(series.drawn, history.rows, points)
        return OtherSeries(run=name, steps=steps, columns=columns)

    return router


def _beside(folder: Path) -> list[str]:
    try:
        return sorted(each.parent.name for each in folder.parent.glob(f"*/{METRICS}") if each.parent != folder)
    except OSError:
        return []


def configuration_keys(config: RunConfig) -> list[ConfigurationKey]:
    """Return every key of a configuration, without secrets."""
    helps = {key.key: " ".join(key.help.split()) for key in keys()}
    found = list[ConfigurationKey]()

    def walk(section: BaseModel, prefix: str) -> None:
        dumped = section.model_dump(mode="json")
        for name, field in type(section).model_fields.items():
            value, key = getattr(section, name), f"{prefix}{name}"
            if isinstance(value, BaseModel):
                walk(value, f"{key}.")
                continue
            shown = without_secrets(key, dumped[name])
            changed = field.is_required() or value != field.get_default(call_default_factory=True)
            found.append(ConfigurationKey(key=key, value=shown, changed=changed, help=helps.get(key, "")))

    walk(config, "")
    return found
