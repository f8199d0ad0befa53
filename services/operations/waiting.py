"""Waits until a run complies with an operator's request.

Guarantees: waiting only reads; it ends at its limit, or when nobody waits for the answer, and returns who has not complied by
then.
Waits for: the pods of a role, or the run. Unblocked by: heartbeats, which pods send at once when a pause begins or ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar

from services.store import Store

POLL_S = 0.1
LONGEST_WAIT_S = 3600.0
BUSY_PHASES = ("starting", "loading")  # such a pod does no work that a pause could end

caller_gone: ContextVar[Callable[[], Coroutine[None, None, None]] | None] = ContextVar("caller_gone", default=None)
"""Returns once the caller is gone, such as the client of an endpoint; None: the caller stays until it has the answer."""


async def until_none(poll: Callable[[], Awaitable[list[str]]], wait_s: float) -> list[str]:
    """Poll until `poll` returns no names, `wait_s` seconds have passed or the caller is gone. Return the last names."""
    deadline, leaves = time.monotonic() + wait_s, caller_gone.get()
    gone = asyncio.ensure_future(leaves()) if leaves else asyncio.Future[None]()
    try:
        while (left := await poll()) and time.monotonic() < deadline and not gone.done():
            await asyncio.wait([gone], timeout=POLL_S)
    finally:
        gone.cancel()
    return left


async def not_paused(store: Store, role: str, mode: str, ttl_s: float) -> list[str]:
    """Return the pods of a role that are not paused in `mode`; for an empty mode, those that have not resumed."""
    pods = [pod for pod in await store.fleet.members(ttl_s) if pod.kind == role]
    return sorted(pod.name for pod in pods if pod.paused != mode and (not mode or pod.phase not in BUSY_PHASES))


async def not_scaled(store: Store, replicas: int, ttl_s: float) -> list[str]:
    """Return the surplus generators, or one entry that says how many are missing."""
    running = sorted(pod.name for pod in await store.fleet.members(ttl_s) if pod.kind == "generator" and pod.phase != "draining")
    if len(running) < replicas:
        return [f"{replicas - len(running)} more generators"]
    return running[replicas:]
