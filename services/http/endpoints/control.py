"""Endpoints that control the run, served by every service: its state, pause and resume of a role, the number of generators."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, HTTPException

from services.http.endpoints.parameters import WaitS
from services.http.models import Desired, Pause, PodState, Reason, Scaled, ScaleRequest, State
from services.http.problems import problems
from services.operations.control import RunControl, reason
from services.runtime.service import Service
from services.store.records import ROLES, Role


def run_control(service: Service) -> RunControl:
    """Return what carries out the verbs that a service's endpoints offer."""
    config = service.config
    return RunControl(service.store, config.fleet.ttl_s, config.fleet, service.folder / "checkpoints")


def control_router(service: Service, guard: Any, reader: Any) -> APIRouter:
    """Return the router of these endpoints; changing calls depend on `guard`, the others on `reader`."""
    router = APIRouter(prefix="/v1", tags=["control"])
    control = run_control(service)

    def selected(role: Role | None) -> Role:
        if role is not None:
            return role
        if service.kind not in ROLES:
            raise HTTPException(422, f"a {service.kind} cannot be paused: give the role, one of {', '.join(ROLES)}")
        return service.kind  # type: ignore[return-value]

    @router.get("/state", dependencies=[reader])
    async def state() -> State:
        """Return the state of this pod and of the run, and the desired state with who set it and why."""
        run = await service.view.refresh()
        status = service.status
        pod = PodState(**{name: getattr(status, name) for name in status.__struct_fields__})
        return State(run=service.config.run.name, pod=pod, state=run)

    @router.post("/pause", dependencies=[guard])
    async def pause(request: Pause | None = None, role: Role | None = None, wait_s: WaitS = 0.0) -> Desired:
        """Pause a role, by default this service's, until it is resumed. Pods that start later are paused too."""
        one, request = selected(role), request or Pause()
        left = await control.pause([one], request.mode, request.why, request.who, wait_s)
        return Desired(role=one, paused=True, mode=request.mode, why=reason(request.why, request.who), waiting_for=left)

    @router.post("/resume", dependencies=[guard])
    async def resume(request: Reason | None = None, role: Role | None = None, wait_s: WaitS = 0.0) -> Desired:
        """Resume a role, by default this service's."""
        one, request = selected(role), request or Reason()
        left = await control.resume([one], request.why, request.who, wait_s)
        return Desired(role=one, paused=False, mode=None, why=reason(request.why, request.who), waiting_for=left)

    @router.post("/fleet/generators", dependencies=[guard], responses=problems(409))
    async def scale(request: ScaleRequest, wait_s: WaitS = 0.0) -> Scaled:
        """Set the number of generators. 409: they do not fit, or an autoscaler decides."""
        left = await control.scale(request.replicas, request.why, request.who, wait_s)
        return Scaled(replicas=request.replicas, why=reason(request.why, request.who), waiting_for=left)

    return router
