"""Endpoints for the run as a whole: its ledger, pause, resume and stop, and those of inspection.py."""

from __future__ import annotations

from fastapi import APIRouter

from services.operations.endpoints.inspection import inspection_router
from services.operations.inspection.ledger import AuditReport, audit
from services.runtime.http.models import ROLES, Pause, Reason, RunDesire
from services.runtime.http.problems import problems
from services.runtime.http.waiting import WaitS, not_paused, until_none
from services.runtime.service import Service


def add_routes(service: Service) -> None:
    """Add the endpoints to the service's app."""
    router = APIRouter(prefix="/v1", tags=["run"])
    guard = [service.app.state.guard]
    run = service.config.run.name

    store, ttl_s = service.store, service.config.fleet.ttl_s

    async def not_there(modes: dict[str, str]) -> list[str]:
        return [name for role, mode in modes.items() for name in await not_paused(store, role, mode, ttl_s)]

    async def not_ended() -> list[str]:
        state = await store.run.state()
        return [] if state is None or state.finished else ["trainer"]

    @router.get("/ledger", dependencies=[service.app.state.reader])
    async def ledger() -> dict[str, int]:
        """Count the tickets in each place and with each outcome, at one instant."""
        return await store.run.audit()

    @router.get("/audit", dependencies=[service.app.state.reader], responses=problems(503))
    async def audited() -> AuditReport:
        """Audit the ledger for lost or duplicated tickets and leaked slots. 503: the run does not exist yet."""
        return await audit(store)

    @router.post("/run/pause", dependencies=guard)
    async def pause(wish: Pause | None = None, wait_s: WaitS = 0.0) -> RunDesire:
        """Pause every role: generators in the given mode, the others between two steps."""
        wish = wish or Pause()
        modes = {role: wish.mode if role == "generator" else "keep" for role in ROLES}
        for role in ROLES:
            await store.run.pause(role, wish.text, wish.mode if role == "generator" else "keep")
        return RunDesire(run=run, desired="paused", waiting_for=await until_none(lambda: not_there(modes), wait_s))

    @router.post("/run/resume", dependencies=guard)
    async def resume(wait_s: WaitS = 0.0) -> RunDesire:
        """Resume every role."""
        for role in ROLES:
            await store.run.resume(role)
        return RunDesire(
            run=run, desired="running", waiting_for=await until_none(lambda: not_there(dict.fromkeys(ROLES, "")), wait_s)
        )

    @router.post("/run/stop", dependencies=guard, responses=problems(409))
    async def stop(reason: Reason | None = None, wait_s: WaitS = 0.0) -> RunDesire:
        """End the run after the step in training: checkpoint, export, exit. 409: the run is being restored."""
        await store.run.stop((reason or Reason()).text)
        return RunDesire(run=run, desired="stopping", waiting_for=await until_none(not_ended, wait_s))

    service.app.include_router(router)
    service.app.include_router(inspection_router(service))
