"""Implements `grpo smoke`, which verifies that a run makes progress. It only reads.

Waits for: steps of the run. Unblocked by: a poll every `POLL_S`; at the time limit it reports what the run waits for.
"""

from __future__ import annotations

import asyncio
import time

from services.console.attach import Attached, attach
from services.console.commands.audit import audit
from services.console.errors import EXIT_FAILED, EXIT_OK, ConsoleError
from services.console.printable import print_json, printable
from services.operations.observe import fleet

POLL_S = 0.5


async def smoke(run: str, redis_url: str, steps: int, limit_s: float, as_json: bool = False) -> int:
    """Wait until a run trains `steps` more steps or ends, then audit its tickets. Raise `ConsoleError` if either fails."""
    async with attach(run, redis_url) as attached:
        ended = await _watch(attached, steps, time.monotonic() + limit_s)
        found = await audit(attached.store)
    if not found.ok:
        raise ConsoleError(f"run {attached.name}: the audit found a problem: see grpo audit", EXIT_FAILED)
    progress = f"finished ({ended})" if ended else f"trained {steps} more steps"
    if as_json:
        print_json({"run": attached.name, "finished": ended, "steps": None if ended else steps, **found.as_dict()})
    else:
        print(f"run {attached.name}: {progress}, no ticket lost or duplicated")
    return EXIT_OK


async def _watch(attached: Attached, steps: int, deadline: float) -> str:
    """Wait for `steps` more steps, or the end.

    Return how the run ended; empty: it trained the steps. Steps that a restore undoes count as trained.
    """
    last: int | None = None
    trained = 0
    while True:
        state = await attached.store.run.state()
        if state is not None:
            trained += max(0, state.committed_step - last) if last is not None else 0
            last = state.committed_step
            if state.finished or trained >= steps:
                return printable(state.finished)
        if not attached.live:
            raise ConsoleError(f"run {attached.name} is stopped: start it with grpo run", EXIT_FAILED)
        if time.monotonic() > deadline:
            raise ConsoleError(f"run {attached.name}: trained {trained} of {steps} steps; {await _why(attached)}", EXIT_FAILED)
        await asyncio.sleep(POLL_S)


async def _why(attached: Attached) -> str:
    """Explain why a run makes no progress."""
    state = await attached.store.run.state()
    if state is None:
        return "it does not exist yet: see the log of dataprep"
    if state.paused:
        return "paused: " + ", ".join(f"{role} ({printable(why)})" for role, why in sorted(state.paused.items()))
    pods = await fleet(attached.store, attached.ttl_s)
    return "pods: " + (", ".join(sorted(f"{pod.status.name} {pod.status.phase}" for pod in pods)) or "none")
