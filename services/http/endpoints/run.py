"""Endpoints for the run as a whole: its ledger, pause, resume and stop, and those of inspection.py."""

from __future__ import annotations

from fastapi import APIRouter

from services.http.endpoints.control import run_control
from services.http.endpoints.inspection import inspection_router
from services.http.endpoints.parameters import WaitS
from services.http.models import Pause, Reason, RunDesire
from services.http.problems import problems
from services.operations.inspection.ledger import AuditReport, audit
from services.runtime.service import Service
from services.store.records import ROLES


def add_routes(service: Service) -> None:
    """Add the endpoints to the service's app."""
    router = APIRouter(prefix="/v1", tags=["run"])
    guard = [service.app.state.guard]
    run, store, control = service.config.run.name, service.store, run_control(service)

    @router.get("/ledger", dependencies=[service.app.state.reader])
    async def ledger() -> dict[str, int]:
        """Count the tickets in each place and with each outcome, at one instant."""
        return await store.run.audit()

    @router.get("/audit", summary="Audit", dependencies=[service.app.state.reader], responses=problems(503))
    async def audited() -> AuditReport:
        """Audit the ledger for lost or duplicated tickets and leaked slots. 503: the run does not exist yet."""
        return await audit(store)

    @router.post("/run/pause", dependencies=guard)
    async def pause(request: Pause | None = None, wait_s: WaitS = 0.0) -> RunDesire:
        """Pause every role: generators in the given mode, the others between two steps."""
        request = request or Pause()
        left = await control.pause(ROLES, request.mode, request.why, request.who, wait_s)
        return RunDesire(run=run, desired="paused", waiting_for=left)

    @router.post("/run/resume", dependencies=guard)
    async def resume(reason: Reason | None = None, wait_s: WaitS = 0.0) -> RunDesire:
        """Resume every role."""
        reason = reason or Reason()
        left = await control.resume(ROLES, reason.why, reason.who, wait_s)
        return RunDesire(run=run, desired="running", waiting_for=left)

    @router.post("/run/stop", dependencies=guard, responses=problems(409))
    async def stop(reason: Reason | None = None, wait_s: WaitS = 0.0) -> RunDesire:
        """End the run after the step in training: checkpoint, export, exit. 409: the run is being restored."""
        reason = reason or Reason()
        return RunDesire(run=run, desired="stopping", waiting_for=await control.stop(reason.why, reason.who, wait_s))

    service.app.include_router(router)
    service.app.include_router(inspection_router(service))
