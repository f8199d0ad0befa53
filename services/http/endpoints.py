"""The endpoints of a run: its control, checkpoints and inspection.

Guarantees: changing calls need the scope `operate`, the others `read`; each carries out a verb of operations/control.py.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Path, Query, Request

from services.http.models import UNEXPLAINED, Desired, PodState, Reason, RequeueRequest, RunDesire, Scaled, ScaleRequest, State
from services.http.problems import problems
from services.operations.control import LONGEST_WAIT_S, RunControl, caller_gone, reason
from services.operations.inspection.answer import MAX_PAGE
from services.operations.inspection.buffer import Buffer, inspect_buffer
from services.operations.inspection.checkpoints import AskedCheckpoint, AskedRestore, CheckpointList, inspect_checkpoints
from services.operations.inspection.completions import MAX_COMPLETIONS
from services.operations.inspection.deadletters import (
    DeadLetterBody,
    DeadLetters,
    RequeueAnswer,
    inspect_dead_letter,
    inspect_dead_letters,
)
from services.operations.inspection.group import Group, inspect_group
from services.operations.inspection.ledger import AuditReport, audit
from services.operations.inspection.step import Step, inspect_step
from services.operations.inspection.sync import SyncAnswer, inspect_sync
from services.operations.inspection.text import TextReader
from services.runtime.service import Service
from services.store.inspection import Sort
from services.store.records import ROLES, Role

Offset = Annotated[int, Query(ge=0, le=2**31, description="Entries to skip.")]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Entries per page.")]
Completions = Annotated[int, Query(ge=1, le=MAX_COMPLETIONS, description="Completions to show.")]
Number = Annotated[int, Query(ge=0, le=2**31)]
Seconds = Annotated[
    float,
    Query(
        ge=0,
        le=LONGEST_WAIT_S,
        description="Seconds to wait for completion; the response's `waiting_for` names those that have not complied yet.",
    ),
]


async def disconnected(request: Request) -> None:
    """Return once the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _watched(request: Request, wait_s: Seconds = 0.0) -> float:
    caller_gone.set(partial(disconnected, request))
    return wait_s


WaitS = Annotated[float, Depends(_watched)]
"""Seconds to wait, which end when the client disconnects."""


def run_control(service: Service) -> RunControl:
    """Return what carries out the verbs that a service's endpoints offer."""
    config = service.config
    return RunControl(service.store, config.fleet.ttl_s, config.fleet, service.folder / "checkpoints")


def control_router(service: Service) -> APIRouter:
    """Return the router of the endpoints that every service has: state, pause and resume of a role, number of generators."""
    router = APIRouter(prefix="/v1", tags=["control"])
    control, guard, reader = run_control(service), service.app.state.guard, service.app.state.reader

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
        pod = PodState.model_validate(service.status, from_attributes=True)
        return State(run=service.config.run.name, pod=pod, state=run)

    @router.post("/pause", dependencies=[guard])
    async def pause(request: Reason = UNEXPLAINED, role: Role | None = None, wait_s: WaitS = 0.0) -> Desired:
        """Pause a role, by default this service's, until it is resumed. Pods that start later are paused too.

        Generators freeze their requests in flight; dataprep and the trainer pause between two steps.
        """
        one = selected(role)
        left = await control.pause([one], request.why, request.who, wait_s)
        return Desired(role=one, paused=True, why=reason(request.why, request.who), waiting_for=left)

    @router.post("/resume", dependencies=[guard])
    async def resume(request: Reason = UNEXPLAINED, role: Role | None = None, wait_s: WaitS = 0.0) -> Desired:
        """Resume a role, by default this service's."""
        one = selected(role)
        left = await control.resume([one], request.why, request.who, wait_s)
        return Desired(role=one, paused=False, why=reason(request.why, request.who), waiting_for=left)

    @router.post("/fleet/generators", dependencies=[guard], responses=problems(409))
    async def scale(request: ScaleRequest, wait_s: WaitS = 0.0) -> Scaled:
        """Set the number of generators. 409: they do not fit, or an autoscaler decides."""
        left = await control.scale(request.replicas, request.why, request.who, wait_s)
        return Scaled(replicas=request.replicas, why=reason(request.why, request.who), waiting_for=left)

    return router


def add_run_routes(service: Service) -> None:
    """Add the endpoints of the run as a whole, which dataprep and the web console serve, to a service's app."""
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
    async def pause(reason: Reason = UNEXPLAINED, wait_s: WaitS = 0.0) -> RunDesire:
        """Pause every role."""
        left = await control.pause(ROLES, reason.why, reason.who, wait_s)
        return RunDesire(run=run, desired="paused", waiting_for=left)

    @router.post("/run/resume", dependencies=guard)
    async def resume(reason: Reason = UNEXPLAINED, wait_s: WaitS = 0.0) -> RunDesire:
        """Resume every role."""
        left = await control.resume(ROLES, reason.why, reason.who, wait_s)
        return RunDesire(run=run, desired="running", waiting_for=left)

    @router.post("/run/stop", dependencies=guard, responses=problems(409))
    async def stop(reason: Reason = UNEXPLAINED, wait_s: WaitS = 0.0) -> RunDesire:
        """End the run after the step in training: checkpoint, export, exit. 409: the run is being restored."""
        return RunDesire(run=run, desired="stopping", waiting_for=await control.stop(reason.why, reason.who, wait_s))

    service.app.include_router(router)
    service.app.include_router(inspection_router(service))


def add_checkpoint_routes(service: Service) -> None:
    """Add the endpoints of the checkpoints, which the trainer and the web console serve, to a service's app."""
    router = APIRouter(prefix="/v1", tags=["checkpoints"])
    root, run, kept = service.folder / "checkpoints", service.config.run, service.config.checkpoint
    control = run_control(service)

    @router.get("/checkpoints", dependencies=[service.app.state.reader])
    async def checkpoints() -> CheckpointList:
        """List the checkpoints in the run's folder. `grpo checkpoints --verify` also finds damaged files."""
        return await asyncio.to_thread(inspect_checkpoints, root, run.steps, kept.every_steps, kept.keep)

    @router.post("/checkpoint", dependencies=[service.app.state.guard], responses=problems(404))
    async def checkpoint(reason: Reason = UNEXPLAINED, wait_s: WaitS = 0.0) -> AskedCheckpoint:
        """Write a checkpoint as soon as no step is in training. Repeated requests before then result in one checkpoint.

        With `wait_s`, the response is sent when the checkpoint is written, has failed, or the time is up; see `saved`.
        """
        return await control.checkpoint(reason.why, reason.who, wait_s)

    @router.post("/restore", dependencies=[service.app.state.guard], responses=problems(404))
    async def restore(step: Number, reason: Reason = UNEXPLAINED, wait_s: WaitS = 0.0) -> AskedRestore:
        """Restore the run to the checkpoint of a step. Later steps are trained again.

        The trainer restarts for this, so this process may exit before it can confirm the restore.
        """
        return await control.restore(step, reason.why, reason.who, wait_s)

    service.app.include_router(router)


def inspection_router(service: Service) -> APIRouter:
    """Return the router of the endpoints that inspect the run (docs/inspect.md)."""
    router = APIRouter(prefix="/v1", tags=["inspection"], dependencies=[service.app.state.reader])
    config, store, control = service.config, service.store, run_control(service)
    reader = TextReader(config.model.path)

    @router.get("/buffer", responses=problems(404))
    async def buffer(sort: Sort = "order", reverse: bool = False, offset: Offset = 0, limit: Limit = 100) -> Buffer:
        """Return the state of the replay table and a page of its groups."""
        return await inspect_buffer(store, sort, offset, limit, reverse)

    @router.get("/groups/{id}", responses=problems(404))
    async def group(id: str, offset: Offset = 0, limit: Completions = 16) -> Group:
        """Return where a group is, and a page of its completions as text."""
        return await inspect_group(store, id, reader, config.advantage.kind, offset, limit)

    @router.get("/steps/{n}", responses=problems(404))
    async def step(n: Annotated[int, Path(ge=0, le=2**31)], offset: Offset = 0, limit: Limit = 100) -> Step:
        """Return a step's plan and a page of its groups or, once the step is retired, its metrics."""
        return await inspect_step(store, n, config.trainer.row_tokens, offset, limit)

    @router.get("/sync")
    async def sync() -> SyncAnswer:
        """Return the last round of weight sync, what the trainer sent, and what each generator holds."""
        return await inspect_sync(store, config.fleet.ttl_s)

    @router.get("/deadletters", responses=problems(404))
    async def dead_letters(before: str = "", limit: Limit = 100) -> DeadLetters:
        """List the dead letters, newest first. `before`: the previous page's `next`."""
        return await inspect_dead_letters(store, limit, before)

    @router.get("/deadletters/{id}", responses=problems(404))
    async def dead_letter(id: str) -> DeadLetterBody:
        """Return a dead letter with its body."""
        return await inspect_dead_letter(store, id)

    @router.post("/deadletters/requeue", dependencies=[service.app.state.guard], responses=problems(404, 409))
    async def requeue(which: RequeueRequest) -> RequeueAnswer:
        """Requeue the tickets of dead letters."""
        return await control.requeue(None if which.all else which.ids)

    return router
