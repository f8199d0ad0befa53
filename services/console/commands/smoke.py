"""`grpo smoke`: whether a run gets on. It watches, and changes nothing.

Waits for: steps of the run. Unblocked by: a look every `POLL_S`; after the limit it says what the run waits for.
"""

from __future__ import annotations

import asyncio
import time

from services.console.attach import Attached, attach
from services.console.commands.audit import audit
from services.console.errors import EXIT_FAILED, EXIT_OK, ConsoleError
from services.console.printable import printable
from services.operations.observe import fleet

POLL_S = 0.5


async def smoke(run: str, redis_url: str, steps: int, limit_s: float) -> int:
    """See a run train `steps` more steps, or end, and account for its tickets. Raises `ConsoleError` when it does not."""
    async with attach(run, redis_url) as attached:
        ended = await _watch(attached, steps, time.monotonic() + limit_s)
        found = await audit(attached.store)
    if not found.ok:
        raise ConsoleError(f"run {attached.name}: the account of tickets does not balance: grpo audit", EXIT_FAILED)
    print(
        f"run {attached.name}: {f'has finished ({ended})' if ended else f'trained {steps} more steps'}, no ticket lost or doubled"
    )
    return EXIT_OK


async def _watch(attached: Attached, steps: int, deadline: float) -> str:
    """How the run ended, or empty when it has trained so many steps more."""
    first: int | None = None
    while True:
        state = await attached.store.state()
        if state is not None:
            first = state.committed_step if first is None else first
            if state.finished or state.committed_step - first >= steps:
                return printable(state.finished)
        if time.monotonic() > deadline:
            trained = 0 if state is None or first is None else state.committed_step - first
            raise ConsoleError(f"run {attached.name}: trained {trained} of {steps} steps; {await _why(attached)}", EXIT_FAILED)
        await asyncio.sleep(POLL_S)


async def _why(attached: Attached) -> str:
    """What there is to know about a run that does not get on."""
    state = await attached.store.state()
    if state is None:
        return "it does not exist yet: see the log of dataprep"
    if state.paused:
        return "paused: " + ", ".join(f"{role} ({printable(why)})" for role, why in sorted(state.paused.items()))
    pods = await fleet(attached.store, attached.ttl_s)
    return "pods: " + (", ".join(sorted(f"{pod.status.name} {pod.status.phase}" for pod in pods)) or "none")
