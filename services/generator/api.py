"""The generator's own endpoints."""

from __future__ import annotations

import asyncio

import structlog
from fastapi import APIRouter, HTTPException, Request, Response
from starlette.requests import ClientDisconnect

from services.generator.loop import GeneratorLoop
from services.generator.serving import REQUEST_BYTES, NotServed
from services.http.endpoints import WaitS, disconnected
from services.http.models import UNEXPLAINED, Draining, Reason
from services.operations.control import reason, until_none
from services.runtime.holding import ROOM
from services.runtime.service import Service

log = structlog.get_logger()

GENERATE = "/v1/generate"


def add_routes(service: Service, loop: GeneratorLoop) -> None:
    """Add the generator's endpoints to the service's app."""
    router = APIRouter(prefix="/v1", tags=["generator"])

    async def under_way() -> list[str]:
        return [held.ticket.id for held in loop.tickets.held.values()]

    @router.post("/drain", dependencies=[service.app.state.guard])
    async def drain(request: Reason = UNEXPLAINED, wait_s: WaitS = 0.0) -> Draining:
        """Claim no more tickets; finish or hand back those in progress, leave the fleet and exit.

        With `wait_s`, respond when no ticket is in progress or the time is up. Who requested it, and why, is part of the pod's
        status and of its log.
        """
        service.say(draining=reason(request.why, request.who))
        log.info("drain requested", by=service.status.draining)
        loop.draining.set()
        service.notifications.notify(ROOM)
        await until_none(under_way, wait_s)
        return Draining(draining=True, rollouts=len(loop.tickets.held))

    @router.post("/generate", dependencies=[service.app.state.guard], response_class=Response, include_in_schema=False)
    async def generate(request: Request) -> Response:
        """Complete a sequence of tokens for an environment (services/protocol/payloads.py).

        503: ask another generator, or later; the response says why.
        """
        try:
            reply = await loop.serve(await request.body(), lambda: asyncio.ensure_future(disconnected(request)))
        except NotServed as refusal:
            raise HTTPException(refusal.status, str(refusal)) from None
        except ClientDisconnect:  # while the caller was sending
            raise HTTPException(503, "the caller is gone") from None
        return Response(reply, media_type="application/msgpack")

    service.app.state.body_limits[GENERATE] = REQUEST_BYTES
    service.app.include_router(router)
