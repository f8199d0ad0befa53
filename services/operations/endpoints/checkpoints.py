"""Endpoints of the run's checkpoints, which lie in its folder. The trainer has them, and the web console."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query

from services.operations.inspection.checkpoints import (
    AskedCheckpoint,
    AskedRestore,
    CheckpointList,
    inspect_checkpoints,
    request_checkpoint_of,
    request_restore_to,
)
from services.runtime.http.models import Reason
from services.runtime.http.problems import problems
from services.runtime.http.waiting import WaitS, until_none
from services.runtime.service import Service


def add_routes(service: Service) -> None:
    """Add them to the service's app."""
    router = APIRouter(prefix="/v1", tags=["checkpoints"])
    root = service.folder / "checkpoints"

    store = service.store

    async def not_written(step: int) -> list[str]:
        state = await store.run.state()
        return [] if state is None or state.checkpointed_step >= step or state.checkpoint_failed else ["trainer"]

    async def not_restored() -> list[str]:
        state = await store.run.state()
        return [] if state is None or max(state.restore, state.restoring) < 0 else ["trainer"]

    @router.get("/checkpoints", dependencies=[service.app.state.reader])
    async def checkpoints() -> CheckpointList:
        """Checkpoints in the run's folder. Damage inside files is not looked for: `grpo checkpoints --verify` does."""
        return await asyncio.to_thread(inspect_checkpoints, service.config, root)

    @router.post("/checkpoint", dependencies=[service.app.state.guard], responses=problems(404))
    async def checkpoint(reason: Reason | None = None, wait_s: WaitS = 0.0) -> AskedCheckpoint:
        """Write a checkpoint as soon as no step is being trained. Asked again before it is written, it is the same one.

        With `wait_s` the answer comes when it is written, could not be, or the time is over: `saved` says which.
        """
        asked = await request_checkpoint_of(store, (reason or Reason()).text)
        if asked.saved or not wait_s:
            return asked
        await until_none(lambda: not_written(asked.step), wait_s)
        state = await store.run.state()
        saved = state is not None and state.checkpointed_step >= asked.step
        return AskedCheckpoint(step=state.checkpointed_step if state and saved else asked.step, saved=saved)

    @router.post("/restore", dependencies=[service.app.state.guard], responses=problems(404))
    async def restore(step: Annotated[int, Query(ge=0, le=2**31)], wait_s: WaitS = 0.0) -> AskedRestore:
        """Take the run back to the checkpoint of a step. What came after is trained anew.

        The trainer starts again for it, so this process may end before it can say that the run is back.
        """
        asked = await request_restore_to(store, root, step)
        await until_none(not_restored, wait_s)
        return asked

    service.app.include_router(router)
