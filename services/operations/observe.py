"""What the console sees of a run: one consistent-enough look at a time.

Guarantees: a look that fails leaves the last one in place and says so; metrics are passed on in order, each entry once.
Waits for: Redis, `LOOK_LIMIT_S` at most. Unblocks: the supervisor and the screen, which read `Observer.look`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError

from services.protocol.errors import StoreError
from services.protocol.messages import PodStatus
from services.store import RunState, Store

LOOK_EVERY_S = 0.5
LOOK_LIMIT_S = 5.0
BATCH = 1000  # entries of the metrics stream a look takes in


@dataclass(frozen=True)
class Member:
    """A pod and how long ago it was heard of."""

    status: PodStatus
    age_s: float


@dataclass(frozen=True)
class Look:
    """The run at one moment."""

    at: float = float("-inf")  # monotonic seconds before the look was begun
    state: RunState | None = None
    members: list[Member] = field(default_factory=list)
    records: list[dict[str, float]] = field(default_factory=list)  # metrics that are new since the last look
    evaluations: list[dict[str, float]] = field(default_factory=list)  # complete rounds that are new since the last look

    @property
    def finished(self) -> str:
        """How the run ended, or empty."""
        return self.state.finished if self.state else ""

    @property
    def committed_step(self) -> int:
        """The last step committed, -1: none."""
        return self.state.committed_step if self.state else -1


class Observer:
    """Looks at a run through its store."""

    def __init__(self, store: Store, ttl_s: float) -> None:
        self.store, self._ttl_s = store, ttl_s
        self.last = Look()
        self.fault = ""  # why the last look failed, or empty
        self._after = self._evaluated = "-"

    async def look(self) -> Look | None:
        """Look now. None, with `fault` set, when Redis does not answer."""
        begun = time.monotonic()
        try:
            async with asyncio.timeout(LOOK_LIMIT_S):
                state = await self.store.run.state()
                members = await fleet(self.store, self._ttl_s)
                entries = await self.store.monitor.metrics(self._after, BATCH)
                rounds = await self.store.evaluation.records(self._evaluated, BATCH)
        except (StoreError, RedisError, OSError, TimeoutError) as error:
            self.fault = str(error) or "no answer"
            return None
        self.fault = ""
        if entries:
            self._after = entries[-1][0]
        if rounds:
            self._evaluated = rounds[-1][0]
        self.last = Look(begun, state, members, [record for _, record in entries], [record for _, record in rounds])
        return self.last

    async def look_to_the_end(self) -> list[Look]:
        """Look until no entry of the metrics stream is left."""
        looks = []
        while (look := await self.look()) is not None:
            looks.append(look)
            if len(look.records) < BATCH:
                break
        return looks


async def fleet(store: Store, ttl_s: float) -> list[Member]:
    """Pods heard of within `ttl_s`, by name, and how long ago."""
    statuses = await store.fleet.members(ttl_s)
    seconds, microseconds = await store.client.time()
    scores: Any = await store.client.zrange(store.keys.fleet, 0, -1, withscores=True)
    heard: dict[bytes, float] = {member: float(score) for member, score in scores}
    now_s = seconds + microseconds / 1e6
    return sorted(
        (
            Member(status, max(0.0, now_s - heard[member] / 1000))
            for status in statuses
            if (member := status.member.encode()) in heard
        ),
        key=lambda member: member.status.name,
    )
