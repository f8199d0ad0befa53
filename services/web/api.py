"""Endpoints that only the web console has: live figures, chart data, and the scope of the caller's token."""

from __future__ import annotations

import asyncio
from operator import attrgetter
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Query, Response
from fastapi.security import HTTPAuthorizationCredentials
from pydantic import BaseModel

from services.http.authorization import BEARER, Scope, scope_of
from services.operations.inspection.answer import MAX_PAGE
from services.operations.inspection.ledger import OUTCOMES, PLACES
from services.runtime.service import Service
from services.web import series
from services.web.feed import EventResponse, Full
from services.web.watch import Watch

FACTS = [
    *("model.path", "run.steps", "admission.max_staleness", "admission.prompts_per_step", "sampling.group_size"),
    *("generator.count", "fleet.scaling", "advantage.kind", "replay.capacity", "checkpoint.every_steps"),
    *("evaluation.every_steps", "sync.backend"),
]
"""Configuration keys that give figures their context."""


class StepMetricsEntry(BaseModel):
    """Metrics of one step."""

    step: int
    metrics: dict[str, float | None]


class StepsPage(BaseModel):
    """A page of the trained steps, newest first."""

    total: int
    steps: list[StepMetricsEntry]
    next: int | None
    """`before` of the next page; null: this is the last page."""


class Series(BaseModel):
    """Data of the charts: one column per metric, each as long as `steps`."""

    revision: float
    """Changes when steps are undone by a restore, which makes earlier charts invalid."""
    steps: list[int]
    columns: dict[str, list[float | None]]


class Rounds(BaseModel):
    """Evaluation rounds, newest first."""

    rounds: list[dict[str, float | None]]


class Bearer(BaseModel):
    """Scope of the caller's token."""

    scope: Scope


class About(BaseModel):
    """Facts that do not change while this server runs."""

    run: str
    facts: dict[str, Any]
    places: dict[str, str]
    outcomes: dict[str, str]


def console_router(service: Service, watch: Watch) -> APIRouter:
    """Return the router of these endpoints."""
    router = APIRouter(prefix="/v1/console", tags=["console"], dependencies=[service.app.state.reader])

    @router.get("/about")
    async def about() -> About:
        """Return the run's name, the configuration keys that give figures their context, and the labels of the ledger."""
        return About(
            run=service.config.run.name,
            facts={key: attrgetter(key)(service.config) for key in FACTS},
            places=PLACES,
            outcomes=OUTCOMES,
        )

    @router.get("/live", response_class=EventResponse, status_code=200)
    async def live() -> Response:
        """Stream server-sent events: `frame`, the state of the run, once a second; `bye`, the last one, when the server stops."""
        try:
            return EventResponse(watch.feed.subscribe())
        except Full as error:
            raise HTTPException(503, str(error)) from None

    @router.get("/series", summary="Series")
    async def charted(points: Annotated[int, Query(ge=1, le=series.MOST_POINTS)] = 400) -> Series:
        """Return the charted metrics of all steps, in at most `points` points."""
        await watch.poll()
        steps, columns = await asyncio.to_thread(series.drawn, dict(watch.steps.rows), points)
        return Series(revision=watch.steps.incarnation, steps=steps, columns=columns)

    @router.get("/steps")
    async def steps(
        before: Annotated[int, Query(ge=0, le=2**31)] = 2**31, limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 50
    ) -> StepsPage:
        """List the steps before `before`, newest first."""
        await watch.poll()
        found = sorted((step for step in watch.steps.rows if step < before), reverse=True)
        page = [StepMetricsEntry(step=step, metrics=_named(watch.steps.rows[step])) for step in found[:limit]]
        return StepsPage(total=len(watch.steps.rows), steps=page, next=page[-1].step if len(found) > limit else None)

    @router.get("/evaluations")
    async def evaluations(limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100) -> Rounds:
        """List the completed evaluation rounds, newest first."""
        await watch.poll()
        found = [watch.rounds.rows[version] for version in sorted(watch.rounds.rows, reverse=True)[:limit]]
        return Rounds(rounds=found)

    @router.get("/scope")
    async def scope(given: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)]) -> Bearer:
        """Return the scope of the request's token. 401: the token is unknown, and reading needs one."""
        return Bearer(scope=scope_of(service.app.state.tokens, given.credentials) if given else "")

    return router


def _named(row: Any) -> dict[str, float | None]:
    return dict(zip(series.CHARTED, series.plain(row), strict=True))
