"""Waiting for the effect of what an operator asked for.

Guarantees: looks, and changes nothing; ends at the limit, and says then who has not followed yet.
Waits for: the pods of a role, or the run. Unblocked by: their heartbeats, which they send at once when a pause begins or ends.
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
        description="Seconds to wait for the effect; the answer's `waiting_for` says who has not followed.",
    ),
]
BUSY_PHASES = ("starting", "loading")  # such a pod does no work that a pause could end


async def until_none(look: Callable[[], Awaitable[list[str]]], wait_s: float) -> list[str]:
    """Whom `look` names at last: nobody, or those left after `wait_s` seconds."""
    deadline = time.monotonic() + wait_s
    while (left := await look()) and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    return left


async def not_paused(store: Store, role: str, mode: str, ttl_s: float) -> list[str]:
    """Pods of a role that do not pause as asked; with an empty mode: that do not work again."""
    pods = [pod for pod in await store.fleet.members(ttl_s) if pod.kind == role]
    return sorted(pod.name for pod in pods if pod.paused != mode and (not mode or pod.phase not in BUSY_PHASES))


async def not_scaled(store: Store, replicas: int, ttl_s: float) -> list[str]:
    """Generators that are there and not wanted, or a word for those that are missing."""
    there = sorted(pod.name for pod in await store.fleet.members(ttl_s) if pod.kind == "generator" and pod.phase != "draining")
    if len(there) < replicas:
        return [f"{replicas - len(there)} more generators"]
    return there[replicas:]
