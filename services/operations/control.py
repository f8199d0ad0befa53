"""What an operator can request of a run: each verb once, for the command line, the REST endpoints and the page.

Guarantees: a verb can be repeated without a second effect. It waits at most `wait_s` seconds, or until nobody waits for its
answer, and returns the names of those that have not complied by then; waiting only reads.
Waits for: the pods of a role, or the run. Unblocked by: heartbeats, which pods send at once when a pause begins or ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from pathlib import Path

from services.config.generation import Fleet
from services.operations.condition import LOADING
from services.operations.inspection.checkpoints import (
    AskedCheckpoint,
    AskedRestore,
    request_checkpoint_of,
    request_restore_to,
)
from services.operations.inspection.deadletters import RequeueAnswer, requeue
from services.store import RunState, Store
from services.store.records import Role, Scale

POLL_S = 0.1
LONGEST_WAIT_S = 3600.0

caller_gone: ContextVar[Callable[[], Coroutine[None, None, None]] | None] = ContextVar("caller_gone", default=None)
"""Returns once the caller is gone, such as the client of an endpoint; None: the caller stays until it has the answer."""


class Refused(Exception):
    """The run does not allow this now; the message says why."""


class InvalidRequest(ValueError):
    """The request contradicts itself; the message says what to change."""


class RunControl:
    """Carries the verbs out in the run's Redis. `why` and `who` are recorded with the run."""

    def __init__(self, store: Store, ttl_s: float, fleet: Fleet | None = None, checkpoints: Path | None = None) -> None:
        """`ttl_s`: a pod without a heartbeat for this long is gone. `checkpoints`: the folder that `restore` reads."""
        self._store, self._ttl_s, self._fleet, self._checkpoints = store, ttl_s, fleet, checkpoints

    async def pause(self, roles: Sequence[Role], why: str, who: str, wait_s: float = 0.0) -> list[str]:
        """Pause roles: generators freeze their requests, the others pause between two steps. Return the pods not paused yet."""
        for role in roles:
            await self._store.run.pause(role, reason(why, who))
        return await until_none(lambda: self._differing(roles, paused=True), wait_s)

    async def resume(self, roles: Sequence[Role], why: str, who: str, wait_s: float = 0.0) -> list[str]:
        """Resume roles. Return the pods that have not resumed yet."""
        for role in roles:
            await self._store.run.resume(role, reason(why, who))
        return await until_none(lambda: self._differing(roles, paused=False), wait_s)

    async def stop(self, why: str, who: str, wait_s: float = 0.0) -> list[str]:
        """End the run after the step in training. Return who still runs."""
        await self._store.run.stop(reason(why, who))
        return await until_none(self._not_ended, wait_s)

    async def scale(self, replicas: int, why: str, who: str, wait_s: float = 0.0) -> list[str]:
        """Set the number of generators. Return the surplus and the missing ones. Raise `Refused` if nothing applies it."""
        state = await self._store.run.state()
        if refusal := self._refusal(state, replicas):
            raise Refused(refusal)
        await self._store.run.scale_generators(replicas, reason(why, who))
        return await until_none(lambda: not_scaled(self._store, replicas, self._ttl_s), wait_s)

    async def checkpoint(self, why: str, who: str, wait_s: float = 0.0) -> AskedCheckpoint:
        """Request a checkpoint of the committed steps. Raise `NotFound` when the trainer cannot write it."""
        before = await self._store.run.state()
        asked = await request_checkpoint_of(self._store, reason(why, who))
        if asked.saved or not wait_s:
            return asked
        failed_before = before.checkpoint_failed if before else ""
        await until_none(lambda: self._not_written(asked.step, failed_before), wait_s)
        state = await self._store.run.state()
        if state is None:
            return asked
        saved = state.checkpointed_step >= asked.step
        failure = "" if saved or state.checkpoint_failed == failed_before else state.checkpoint_failed
        return AskedCheckpoint(step=state.checkpointed_step if saved else asked.step, saved=saved, failure=failure)

    async def restore(self, step: int, why: str, who: str, wait_s: float = 0.0) -> AskedRestore:
        """Restore the run to the checkpoint of `step`. Raise `NotFound` when there is no such checkpoint."""
        if self._checkpoints is None:
            raise InvalidRequest("a restore needs the run's folder: run the command where it is")
        before = await self._store.run.state()
        began = before.incarnation if before else 0
        asked = await request_restore_to(self._store, self._checkpoints, step, reason(why, who))
        left = await until_none(lambda: self._not_restored(step, began), wait_s)
        failure = "" if left else await self._restore_failure(step)
        return AskedRestore(step=asked.step, waiting_for=left, failure=failure)

    async def requeue(self, ids: Sequence[str] | None, reason: str = "") -> RequeueAnswer:
        """Requeue dead letters: those named, or all whose reason contains `reason`. Raise `Refused` when the run is over."""
        state, answer = await self._store.run.state(), await requeue(self._store, ids, reason)
        if state is not None and state.ended and not answer.requeued:
            raise Refused(f"the run is over: {state.finished or state.stopping}")
        return answer

    def _refusal(self, state: RunState | None, replicas: int) -> str:
        if state is not None and state.finished:
            return f"the run has already finished: {state.finished}"
        return (self._fleet.refusal if self._fleet else "") or (state.scale if state else Scale()).refusal(replicas)

    async def _differing(self, roles: Sequence[Role], paused: bool) -> list[str]:
        """Return the pods of these roles that are not paused, or still are. A pod that loads does no work to pause."""
        pods = [pod for pod in await self._store.fleet.members(self._ttl_s) if pod.kind in roles]
        pods.sort(key=lambda pod: (roles.index(pod.kind), pod.name))  # type: ignore[arg-type]
        return [pod.name for pod in pods if pod.paused != paused and not (paused and pod.phase in LOADING)]

    async def _not_ended(self) -> list[str]:
        state = await self._store.run.state()
        return [] if state is None or state.finished else ["trainer"]

    async def _not_written(self, step: int, failed_before: str) -> list[str]:
        state = await self._store.run.state()
        failed = state is not None and state.checkpoint_failed not in ("", failed_before)
        return [] if state is None or state.checkpointed_step >= step or failed else ["trainer"]

    async def _not_restored(self, step: int, began: int) -> list[str]:
        state = await self._store.run.state()
        if state is None or state.restore_fault(step):
            return []
        return [] if max(state.restore, state.restoring) < 0 and state.incarnation != began else ["trainer"]

    async def _restore_failure(self, step: int) -> str:
        state = await self._store.run.state()
        if state is None or state.restored == step:
            return ""
        return state.restore_fault(step) or f"a later request has restored the run to step {state.restored} instead"


def reason(why: str, who: str) -> str:
    """Return the line that is recorded with the run: who makes the request, and why."""
    return f"{who or 'REST'}: {why}" if why else who or "REST"


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


async def not_scaled(store: Store, replicas: int, ttl_s: float) -> list[str]:
    """Return the surplus generators, or one entry that says how many are missing."""
    running = sorted(pod.name for pod in await store.fleet.members(ttl_s) if pod.kind == "generator" and pod.phase != "draining")
    if len(running) < replicas:
        return [f"{replicas - len(running)} more generators"]
    return running[replicas:]
