"""Reads what a run records, and its state, one poll at a time: for the files of `grpo run`, the trackers and the web console.

Guarantees: records are passed on in order, each entry once; a poll that fails keeps the last result and sets `fault`. A poll of
the state is only roughly consistent.
Waits for: Redis, at most `POLL_LIMIT_S`. Unblocks: the supervisor and the screen, which read `RunFeed.last`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from services.protocol.errors import StoreError
from services.protocol.messages import PodStatus
from services.store import RunState, Store

POLL_EVERY_S = 0.5
POLL_LIMIT_S = 5.0
BATCH = 1000  # entries of the metrics stream read by one poll


@dataclass(frozen=True)
class Member:
    """A pod, and the age of its last heartbeat."""

    status: PodStatus
    age_s: float


@dataclass(frozen=True)
class Poll:
    """The result of one poll of the run."""

    at: float = float("-inf")  # monotonic seconds just before the poll began
    state: RunState | None = None
    members: list[Member] = field(default_factory=list[Member])
    records: list[dict[str, float]] = field(default_factory=list[dict[str, float]])  # metrics recorded since the last poll
    evaluations: list[dict[str, float]] = field(default_factory=list[dict[str, float]])  # rounds completed since the last poll
    failed: int = 0  # prompts that failed for good
    last_failure: str = ""  # reason of the newest dead letter

    @property
    def finished(self) -> str:
        """How the run ended; empty: it has not."""
        return self.state.finished if self.state else ""

    @property
    def committed_step(self) -> int:
        """The last committed step; -1: none."""
        return self.state.committed_step if self.state else -1


class RunFeed:
    """Polls a run through its store."""

    def __init__(self, store: Store, ttl_s: float) -> None:
        self.store, self._ttl_s = store, ttl_s
        self.last = Poll()
        self.fault = ""  # why the last poll failed, or empty
        self._after = self._evaluated = "-"

    def rewind(self) -> None:
        """Begin again with the first records that Redis still has."""
        self._after = self._evaluated = "-"

    async def records(self) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
        """Return the next records of steps and of evaluation rounds, at most `BATCH` of each. Raises `StoreError`."""
        entries = await self.store.monitor.metrics(self._after, BATCH)
        rounds = await self.store.evaluation.records(self._evaluated, BATCH)
        if entries:
            self._after = entries[-1][0]
        if rounds:
            self._evaluated = rounds[-1][0]
        return [record for _, record in entries], [record for _, record in rounds]

    async def poll(self) -> Poll | None:
        """Poll now. Return None, with `fault` set, if Redis does not respond."""
        begun = time.monotonic()
        try:
            async with asyncio.timeout(POLL_LIMIT_S):
                state = await self.store.run.state()
                members = await fleet(self.store, self._ttl_s)
                failed, failure = await self._failures()
                records, rounds = await self.records()  # last: what follows cannot fail, so none is lost
        except (StoreError, OSError, TimeoutError) as error:
            self.fault = str(error) or "no response"
            return None
        self.fault = ""
        self.last = Poll(begun, state, members, records, rounds, failed, failure)
        return self.last

    async def _failures(self) -> tuple[int, str]:
        """Return how many prompts failed for good, and why the newest one did, which is read only when their number changes."""
        count = await self.store.run.failed()
        if count == self.last.failed:
            return count, self.last.last_failure
        newest = await self.store.dead_letters.page(1)
        return count, newest[0].reason if newest else ""

    async def poll_to_end(self) -> AsyncGenerator[Poll]:
        """Poll until the metrics stream has no more entries. Yields each poll, since a long run's together take a gigabyte."""
        while (poll := await self.poll()) is not None:
            yield poll
            if len(poll.records) < BATCH:
                break


async def fleet(store: Store, ttl_s: float) -> list[Member]:
    """Return the pods with a heartbeat within `ttl_s`, by name, with its age."""
    return sorted(
        (Member(status, max(0.0, age_s)) for status, age_s in await store.fleet.heard(ttl_s)),
        key=lambda member: member.status.name,
    )
