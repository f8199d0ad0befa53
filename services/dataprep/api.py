"""Dataprep's own endpoints: the ledger, and the run as a whole."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from services.runtime.api import Reason
from services.runtime.service import Service

ROLES = ("generator", "dataprep", "trainer")


class Outcome(BaseModel):
    """What was asked of the run."""

    run: str
    desired: Literal["paused", "running", "stopping"]


def add_routes(service: Service) -> None:
    """Add them to the service's app."""
    router = APIRouter(prefix="/v1", tags=["run"])
    guard = [service.app.state.guard]
    run = service.config.run.name

    @router.get("/ledger")
    async def ledger() -> dict[str, int]:
        """Counts of every place a ticket can be in, and of every outcome, in one instant."""
        return await service.store.audit()

    @router.post("/run/pause", response_model=Outcome, dependencies=guard)
    async def pause(reason: Reason | None = None) -> Outcome:
        """Pause every role."""
        for role in ROLES:
            await service.store.pause(role, (reason.why if reason else "") or "REST")
        return Outcome(run=run, desired="paused")

    @router.post("/run/resume", response_model=Outcome, dependencies=guard)
    async def resume() -> Outcome:
        """Let every role go on."""
        for role in ROLES:
            await service.store.resume(role)
        return Outcome(run=run, desired="running")

    @router.post("/run/stop", response_model=Outcome, dependencies=guard)
    async def stop(reason: Reason | None = None) -> Outcome:
        """End the run after the step that is being trained: checkpoint, export, exit."""
        await service.store.stop((reason.why if reason else "") or "REST")
        return Outcome(run=run, desired="stopping")

    service.app.include_router(router)
