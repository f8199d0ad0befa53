"""Parameters that several endpoints take."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import Depends, Query, Request

from services.operations.waiting import LONGEST_WAIT_S, caller_gone

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
