"""Polls the run for all open pages: once a second, and not at all while no page is open.

Guarantees: there is one poll at a time, whatever triggers it; a poll that fails keeps the last result and its time.
Waits for: Redis, at most `POLL_LIMIT_S`, and an open page. Unblocks: the pages, through the feed.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec
from redis.exceptions import RedisError

from services.operations.condition import Condition, awaited, condition
from services.operations.figures import left_s
from services.operations.history import EVALUATED, STEP, History
from services.operations.observe import POLL_LIMIT_S, Member, RunFeed
from services.protocol.errors import StoreError
from services.protocol.messages import Round
from services.runtime.loops import Loop, is_set_within
from services.store import RunState, Store
from services.store.evaluation import EvaluationState
from services.store.records import Scale
from services.web import series
from services.web.feed import Feed

POLL_EVERY_S = 1.0
GLANCE_S = 0.1  # until it is looked again whether a page is open
PODS_SHOWN = 250  # per frame, about 100 KB
RECENT = 21  # steps from which the time left is estimated
_TIME = series.CHARTED.index("time_s")


def running(state: RunState | None) -> Condition:
    """Return the condition of a run whose services are running."""
    return condition(state, live=True)


Describe = Callable[[RunState | None], Condition]
"""Returns the condition of a run in this state."""


@dataclass(frozen=True)
class Seen:
    """Values polled in addition to the observer's `Poll`."""

    evaluation: EvaluationState | None = None
    round: Round | None = None
    acknowledged: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    dead_letters: int = 0


class Watch:
    """Holds the run as last polled, and its feed."""

    def __init__(
        self, store: Store, ttl_s: float, generators: int | None = None, describe: Describe = running, scaling: str = "request"
    ) -> None:
        """`generators` and `scaling`: as in the configuration (`Scale.desired`). `describe` returns what the run is doing."""
        self.feed = Feed()
        self._generators, self._scaling, self._describe = generators, scaling, describe
        self.steps: History[array[float]] = History(STEP, series.keep)
        self.rounds: History[dict[str, Any]] = History(EVALUATED, dict)
        self._store, self._ttl_s = store, ttl_s
        self._observer = RunFeed(store, ttl_s)
        self._seen, self._polled_at, self._fault = Seen(), 0.0, ""
        self._once = asyncio.Lock()
        self._polled = float("-inf")

    async def follow(self, stopping: asyncio.Event, loop: Loop) -> None:
        """Poll while a page is open, until `stopping` is set; then poll once more, so that pages show the final state."""
        while not stopping.is_set():
            if self.feed.watchers:
                await self.poll(loop.progress)
                await self.feed.publish("frame", self.frame())
            loop.progress()
            await is_set_within(stopping, POLL_EVERY_S if self.feed.watchers else GLANCE_S)
        if self.feed.watchers:
            await self.poll()
            await self.feed.publish("bye", self.frame())
        await self.feed.close()

    async def poll(self, progress: Callable[[], None] = lambda: None) -> None:
        """Poll now, unless the last poll was less than half an interval ago. Calls `progress` after each batch of records."""
        async with self._once:
            if time.monotonic() - self._polled < POLL_EVERY_S / 2:
                return
            async for poll in self._observer.poll_to_end():
                for record in poll.records:
                    self.steps.add(record)
                for record in poll.evaluations:
                    self.rounds.add(record)
                progress()
            self._fault = self._observer.fault
            try:
                async with asyncio.timeout(POLL_LIMIT_S):
                    if not self._fault:
                        round, acknowledged = await self._store.fleet.round()
                        evaluation = await self._store.evaluation.state(self._ttl_s)
                        self._seen = Seen(evaluation, round, acknowledged, await self._store.dead_letters.count())
                        self._polled_at = time.time()
            except (StoreError, RedisError, OSError, TimeoutError) as error:
                self._fault = str(error) or "no response"
            self.rounds.outlive(self.steps)
            self._polled = time.monotonic()

    def frame(self) -> bytes:
        """Return the run as last polled, as JSON."""
        state, last = self._observer.last.state, next(reversed(self.steps.rows), -1)
        found = self._describe(state)
        return msgspec.json.encode(
            {
                "at": time.time(),
                "looked_at": self._polled_at,
                "fault": self._fault,
                "condition": found,
                "awaited": self._awaited(state) if found.word in ("running", "paused") else "",
                "state": None if state is None else _state(state),
                "fleet": _fleet(self._observer.last.members),
                "sync": {
                    "round": self._seen.round,
                    "acknowledged": [
                        {"member": member, "stage": stage, "detail": detail}
                        for member, (stage, detail) in sorted(self._seen.acknowledged.items())
                    ],
                },
                "evaluation": self._seen.evaluation,
                "dead_letters": self._seen.dead_letters,
                "steps": {
                    "revision": self.steps.incarnation,
                    "count": len(self.steps.rows),
                    "last": last,
                    "left_s": None if state is None else self._left_s(state.steps),
                },
                "rounds": {"revision": self.rounds.incarnation, "count": len(self.rounds.rows)},
            }
        )

    def _awaited(self, state: RunState | None) -> str:
        wanted = (state.scale if state else Scale()).desired(self._scaling, self._generators)
        return awaited(state, [member.status for member in self._observer.last.members], wanted)

    def _left_s(self, steps: int) -> float | None:
        recent = sorted(islice(reversed(self.steps.rows), RECENT))
        return left_s([{"step": step, "time_s": self.steps.rows[step][_TIME]} for step in recent], steps)


def _state(state: RunState) -> dict[str, Any]:
    """Return the run's state without the fields that only programs compare."""
    fields = {name: value for name, value in vars(state).items() if name not in ("dataset", "config")}
    return {**fields, "checkpoint": state.checkpoint.partition(" ")[2], "ended": state.ended}


def _fleet(members: list[Member]) -> dict[str, Any]:
    """Return figures on all pods, and details of the first `PODS_SHOWN`."""
    phases = Counter((member.status.kind, member.status.phase) for member in members)
    versions = Counter(member.status.version for member in members if member.status.kind == "generator")
    rate = sum(member.status.gauges.get("tokens_per_s", 0.0) for member in members)
    return {
        "total": len(members),
        "phases": [{"kind": kind, "phase": phase, "pods": pods} for (kind, phase), pods in sorted(phases.items())],
        "versions": [{"version": version, "pods": pods} for version, pods in sorted(versions.items(), reverse=True)],
        "tokens_per_s": rate,
        "pods": [{**msgspec.to_builtins(member.status), "age_s": member.age_s} for member in members[:PODS_SHOWN]],
    }
