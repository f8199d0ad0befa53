"""Waits until an operator's request has taken effect.

Guarantees: it only reads; at the time limit it ends and names the pods that have not complied.
Waits for: the pods of a role, or the run. Unblocked by: their heartbeats, sent immediately when a pause begins or ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Query

from services.store import Store

POLL_S = 0.1
LONGEST_WAIT_S = 300.0

WaitS = Annotated[
    float,
    Query(
        ge=0,
        le=LONGEST_WAIT_S,
        description="Seconds to wait for completion; `waiting_for` in the response names the pods that have not complied.",
    ),
]
BUSY_PHASES = ("starting", "loading")  # a pod in one of these phases has no work to pause


async def until_none(look: Callable[[], Awaitable[list[str]]], wait_s: float) -> list[str]:
    """Poll `look` until it returns no names or `wait_s` seconds have passed, and return its last result."""
    deadline = time.monotonic() + wait_s
    while (left := await look()) and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    return left


async def not_paused(store: Store, role: str, mode: str, ttl_s: float) -> list[str]:
    """Return the pods of a role that are not paused in this mode; with an empty mode, those still paused."""
    pods = [pod for pod in await store.fleet.members(ttl_s) if pod.kind == role]
    return sorted(pod.name for pod in pods if pod.paused != mode and (not mode or pod.phase not in BUSY_PHASES))


async def not_scaled(store: Store, replicas: int, ttl_s: float) -> list[str]:
    """Return the surplus generators or, if some are missing, one entry that says how many."""
    there = sorted(pod.name for pod in await store.fleet.members(ttl_s) if pod.kind == "generator" and pod.phase != "draining")
    if len(there) < replicas:
        return [f"{replicas - len(there)} more generators"]
    return there[replicas:]
