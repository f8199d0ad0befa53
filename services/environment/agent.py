"""Drives a rollout whose environment is an agent: a program that calls the policy through the door until it returns a reward.

Guarantees: when the rollout has ended, nothing more is sampled for it.

Waits for: the program. Unblocked by: its end, or its own time limit, in which the policy's time does not count.
"""

from __future__ import annotations

import asyncio
import secrets
import time

from services.environment.endpoints import Door
from services.environment.programs.frames import StepDone
from services.environment.programs.process import ProcessLost, ProgramFailed, ProgramProcess, row_for
from services.environment.rollout import FinishedRollout, LiveRollout

WATCH_S = 0.5  # between checks of the time that a program has taken


async def run_agent(live: LiveRollout, process: ProgramProcess, door: Door, limit_s: float) -> FinishedRollout:
    """Run an agent to its end. Raises `ProgramFailed`, `LeaseLost`, `StoreError`."""
    key = f"rollout-{secrets.token_urlsafe(24)}"
    door.open[key] = live
    given = {"url": door.url, "key": key, "row": row_for(live.place.ticket.row, live.place.ticket.answer)}
    began = time.monotonic()
    running = asyncio.ensure_future(process.do(live.place.name, "run", given))
    try:
        while not (await asyncio.wait([running], timeout=WATCH_S))[0]:
            if live.lost:
                raise live.lost
            if time.monotonic() - began - live.policy_s > limit_s:
                why = f"the agent took longer than timeout_s = {limit_s:g}, without the policy's turns"
                await process.stop(live.place.name, why)
                raise ProgramFailed(why)
        scores = await _scores(running, live)
        if live.lost:
            raise live.lost
        if not live.recorder.turns:
            raise ProgramFailed("the agent exited without calling the policy")
        live.environment_s += max(0.0, time.monotonic() - began - live.policy_s)
        return live.finished(scores)
    finally:
        running.cancel()
        door.close(key)
        process.drop(live.place.name)
        await live.asked.close()
        await asyncio.gather(running, return_exceptions=True)


async def _scores(running: asyncio.Future[StepDone], live: LiveRollout) -> dict[str, float] | None:
    """Return the reward of an agent that has ended; one that a limit stopped may have none."""
    try:
        return (await running).value
    except ProcessLost:
        raise
    except ProgramFailed:
        if not live.truncated:
            raise
        return None
