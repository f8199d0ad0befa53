"""Endpoints that inspect the run: its replay table, groups, steps, weight sync and dead letters (docs/inspect.md)."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from services.http.endpoints.control import run_control
from services.http.models import RequeueRequest
from services.http.problems import problems
from services.operations.inspection.answer import MAX_PAGE
from services.operations.inspection.buffer import Buffer, inspect_buffer
from services.operations.inspection.completions import MAX_COMPLETIONS
from services.operations.inspection.deadletters import (
    DeadLetterBody,
    DeadLetters,
    RequeueAnswer,
    inspect_dead_letter,
    inspect_dead_letters,
)
from services.operations.inspection.group import Group, inspect_group
from services.operations.inspection.step import Step, inspect_step
from services.operations.inspection.sync import SyncAnswer, inspect_sync
from services.operations.inspection.text import TextReader
from services.runtime.service import Service
from services.store.calls.inspection import Sort

Offset = Annotated[int, Query(ge=0, le=2**31, description="Entries to skip.")]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Entries per page.")]
Completions = Annotated[int, Query(ge=1, le=MAX_COMPLETIONS, description="Completions to show.")]


def inspection_router(service: Service) -> APIRouter:
    """Return the router of these endpoints."""
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
