"""The generator's own endpoints."""

from __future__ import annotations

from fastapi import APIRouter

from services.generator.loop import RolloutLoop
from services.operations.waiting import until_none
from services.runtime.http.endpoints.parameters import WaitS
from services.runtime.http.models import Draining
from services.runtime.service import Service


def add_routes(service: Service, rollouts: RolloutLoop) -> None:
    """Add the generator's endpoints to the service's app."""
    router = APIRouter(prefix="/v1", tags=["generator"])

    async def under_way() -> list[str]:
        return [rollout.ticket.id for rollout in rollouts.rollouts.values()]

    @router.post("/drain", dependencies=[service.app.state.guard])
    async def drain(wait_s: WaitS = 0.0) -> Draining:
        """Claim no more tickets; finish or hand back those in progress, leave the fleet and exit.

        With `wait_s`, respond when no ticket is in progress or the time is up.
        """
        rollouts.draining.set()
        service.notifications.notify("room")
        await until_none(under_way, wait_s)
        return Draining(draining=True, rollouts=len(rollouts.rollouts))

    service.app.include_router(router)
