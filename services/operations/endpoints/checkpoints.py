"""Endpoints for the checkpoints in the run's folder. The trainer and the web console serve them."""

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
    """Add the endpoints to the service's app."""
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
        """List the checkpoints in the run's folder. `grpo checkpoints --verify` also finds damaged files."""
        return await asyncio.to_thread(inspect_checkpoints, service.config, root)

    @router.post("/checkpoint", dependencies=[service.app.state.guard], responses=problems(404))
    async def checkpoint(reason: Reason | None = None, wait_s: WaitS = 0.0) -> AskedCheckpoint:
        """Write a checkpoint as soon as no step is in training. Repeated requests before then result in one checkpoint.

        With `wait_s`, the response is sent when the checkpoint is written, has failed, or the time is over; see `saved`.
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
        """Restore the run to the checkpoint of a step. Later steps are trained again.

        The trainer restarts for this, so this process may exit before it can confirm the restore.
        """
        asked = await request_restore_to(store, root, step)
        await until_none(not_restored, wait_s)
        return asked

    service.app.include_router(router)
