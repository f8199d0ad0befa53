"""The rows of a rank's steps: fetched from Redis and built while the previous step trains.

Guarantees: `take` returns the rows of the plan that Redis holds when the step begins, or raises, exactly as if nothing had been
prefetched; a prefetch that failed, or whose plan has changed, is dropped and the step is fetched again; at most one step is held
ahead, and none after `close`.

Waits for: the plan of the next step, which it polls every `POLL_S`. Unblocked by: dataprep; `take` polls immediately.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from services.protocol import codec
from services.protocol.codec import CorruptMessage
from services.protocol.errors import StoreError
from services.protocol.messages import RankPlan, StepPlan
from services.protocol.payloads import Payload
from services.runtime.loops import end_tasks, is_set_within
from services.runtime.portal import Portal
from services.store import Store
from services.trainer.step.batches import PackedRow, PlanMismatch

log = structlog.get_logger()

POLL_S = 0.2  # delay to find a plan that arrives while the previous step trains; shorter than any step worth prefetching for
REFUSALS = (StoreError, CorruptMessage, PlanMismatch)
"""What `Prefetch.take` raises when a step cannot be trained."""

Build = Callable[[RankPlan, Mapping[str, Payload]], list[PackedRow]]


@dataclass(frozen=True)
class Fetched:
    """A rank's part of a step."""

    plan: StepPlan
    ours: RankPlan
    rows: list[PackedRow]
    seconds: float  # time to read and build, without the wait for the plan

    @property
    def digest(self) -> str:
        """Return a digest of the step's plan, equal on all ranks that fetched the same one."""
        return hashlib.sha256(codec.encode(self.plan)).hexdigest()


@dataclass
class _Ahead:
    """A fetch on the portal's loop, in progress or finished."""

    step: int
    due: asyncio.Event  # set when the step begins: by then its plan exists or is gone
    work: asyncio.Task[None] | None = None
    fetched: Fetched | None = None  # stays None if it failed


class Prefetch:
    """Fetches the steps of rank `rank` one after the other, at most one ahead.

    Redis is read on the portal's loop; `build`, which is numpy work, runs in a separate thread so that heartbeats continue.
    """

    def __init__(self, portal: Portal, store: Store, rank: int, build: Build) -> None:
        self._portal, self._store, self._rank, self._build = portal, store, rank, build
        self._ahead: _Ahead | None = None

    def begin(self, step: int) -> None:
        """Fetch `step` in the background as soon as it is prepared, dropping earlier prefetched data."""
        self.close()
        self._ahead = self._portal.call(self._start(step))

    def take(self, step: int) -> tuple[Fetched, float]:
        """Return the rows of a prepared step, and the seconds that its background fetch took, 0 if there was none.

        Raises `Damaged`, which names all payloads that cannot be trained on, `StoreError`, `CorruptMessage`, `PlanMismatch`.
        """
        if self._ahead is not None and self._ahead.step == step:
            ahead, self._ahead = self._ahead, None
            if (fetched := self._portal.call(self._finish(ahead))) is not None:
                return fetched, fetched.seconds
        self.close()
        due = asyncio.Event()
        due.set()
        return self._portal.call(self._fetch(step, due)), 0.0

    def close(self) -> None:
        """Drop prefetched data."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.work is not None:
            self._portal.call(end_tasks([ahead.work]))

    async def _start(self, step: int) -> _Ahead:
        ahead = _Ahead(step, asyncio.Event())
        ahead.work = asyncio.create_task(self._run(ahead), name=f"prefetch {step}")
        return ahead

    async def _run(self, ahead: _Ahead) -> None:
        try:
            ahead.fetched = await self._fetch(ahead.step, ahead.due)
        except REFUSALS as error:  # too early, or Redis was briefly unavailable: only a failure when the step is due matters
            log.info("could not prefetch a step", step=ahead.step, error=str(error))

    async def _finish(self, ahead: _Ahead) -> Fetched | None:
        """Return the prefetched data if it matches the plan that Redis holds now. Raises like `take`."""
        assert ahead.work is not None
        ahead.due.set()
        await ahead.work
        if ahead.fetched is None:
            return None
        if codec.encode(await self._plans(ahead.step)) != codec.encode((ahead.fetched.plan, ahead.fetched.ours)):
            log.warning("the plan of a step changed after it was prefetched", step=ahead.step)
            return None
        return ahead.fetched

    async def _fetch(self, step: int, due: asyncio.Event) -> Fetched:
        while True:
            last = due.is_set()  # checked before polling: a plan is prepared before its step begins
            started = time.perf_counter()
            try:
                plan, ours = await self._plans(step)
                break
            except StoreError:
                if last:
                    raise
                await is_set_within(due, POLL_S)
        names = sorted({sample.payload for row in ours.rows for sample in row})
        payloads = await self._store.steps.payloads(names)
        rows = await asyncio.to_thread(self._build, ours, payloads)
        return Fetched(plan, ours, rows, time.perf_counter() - started)

    async def _plans(self, step: int) -> tuple[StepPlan, RankPlan]:
        """Return the plan of a prepared step and this rank's part of it. Raises `StoreError`."""
        plans = await self._store.steps.plans(step, self._rank)
        if plans is None:
            raise StoreError(f"the plan of step {step} is gone from Redis, but no checkpoint covers the step")
        return plans
