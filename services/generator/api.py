"""The generator's own endpoints."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from services.generator.loop import RolloutLoop
from services.runtime.service import Service


class Draining(BaseModel):
    """Answer to a drain: how many tickets are still under way."""

    draining: bool
    rollouts: int


def add_routes(service: Service, rollouts: RolloutLoop) -> None:
    """Add them to the service's app."""
    router = APIRouter(prefix="/v1", tags=["generator"])

    @router.post("/drain", response_model=Draining, dependencies=[service.app.state.guard])
    async def drain() -> Draining:
        """Claim no more tickets; finish or hand back what is under way, leave the fleet and exit."""
        rollouts.draining.set()
        service.bell.ring("room")
        return Draining(draining=True, rollouts=len(rollouts.rollouts))

    service.app.include_router(router)
