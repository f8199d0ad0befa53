"""Endpoints for the checkpoints in the run's folder. The trainer and the web console serve them."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query

from services.http.endpoints.control import run_control
from services.http.endpoints.parameters import WaitS
from services.http.models import Reason
from services.http.problems import problems
from services.operations.inspection.checkpoints import AskedCheckpoint, AskedRestore, CheckpointList, inspect_checkpoints
from services.runtime.service import Service


def add_routes(service: Service) -> None:
    """Add the endpoints to the service's app."""
    router = APIRouter(prefix="/v1", tags=["checkpoints"])
    root, run, kept = service.folder / "checkpoints", service.config.run, service.config.checkpoint
    control = run_control(service)

    @router.get("/checkpoints", dependencies=[service.app.state.reader])
    async def checkpoints() -> CheckpointList:
        """List the checkpoints in the run's folder. `grpo checkpoints --verify` also finds damaged files."""
        return await asyncio.to_thread(inspect_checkpoints, root, run.steps, kept.every_steps, kept.keep)

    @router.post("/checkpoint", dependencies=[service.app.state.guard], responses=problems(404))
    async def checkpoint(reason: Reason | None = None, wait_s: WaitS = 0.0) -> AskedCheckpoint:
        """Write a checkpoint as soon as no step is in training. Repeated requests before then result in one checkpoint.

        With `wait_s`, the response is sent when the checkpoint is written, has failed, or the time is up; see `saved`.
        """
        reason = reason or Reason()
        return await control.checkpoint(reason.why, reason.who, wait_s)

    @router.post("/restore", dependencies=[service.app.state.guard], responses=problems(404))
    async def restore(
        step: Annotated[int, Query(ge=0, le=2**31)], reason: Reason | None = None, wait_s: WaitS = 0.0
    ) -> AskedRestore:
        """Restore the run to the checkpoint of a step. Later steps are trained again.

        The trainer restarts for this, so this process may exit before it can confirm the restore.
        """
        reason = reason or Reason()
        return await control.restore(step, reason.why, reason.who, wait_s)

    service.app.include_router(router)
