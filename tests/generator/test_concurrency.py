"""How many tickets a pod holds: the bounds for any history, and the effect on engines of any capacity."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.generator.concurrency import KV_FULL, KV_ROOM, POLL_S, SLACK_SHARE, Bounds, Limit, adjust, fair_share
from services.generator.engines.base import QUEUED_S, Gauges
from tests.support.harness import small_config

GROUP = 4
BOUNDS = Bounds(128, 256, GROUP)
LOOKS = st.lists(
    st.tuples(
        st.integers(0, 300), st.integers(0, 300), st.integers(0, 300), st.floats(0, 1), st.integers(0, 40), st.booleans()
    ),  # running, coming, queued, KV cache usage, held, whether tokens were generated
    max_size=200,
)  # fmt: skip


@given(LOOKS, st.integers(1, 64), st.integers(1, 512), st.integers(1, 16), st.integers(1, 64))
def test_the_limit_stays_in_bounds_and_moves_only_for_a_reason(
    looks: list[tuple[int, int, int, float, int, bool]], most: int, seats: int, group_size: int, start: int
) -> None:
    limit, tokens, bounds = Limit(min(start, most)), 0, Bounds(most, seats, group_size)
    for running, coming, queued, usage, held, made in looks:
        tokens += made
        before, limit = limit, adjust(limit, Gauges(running, coming + queued, queued, usage, tokens), held, bounds)
        assert 1 <= limit.groups <= most
        queue = queued > max(running // SLACK_SHARE, group_size - 1)
        if not made:
            assert limit == before, "an idle engine gives no information"
        if limit.groups > before.groups:
            assert not queue
            assert usage < KV_FULL
            assert held >= before.groups, "the limit was not reached"
            assert limit.groups - before.groups <= max(1, before.groups // 4)
            assert running + queued + coming < seats * (1 + 1 / SLACK_SHARE) + group_size
        if limit.groups < before.groups:
            assert usage >= KV_FULL or queue
            assert limit.groups >= before.groups // 2


@dataclass
class Simulated:
    """A simulated engine that runs up to `capacity` completions in order of arrival, each for a number of polls."""

    capacity: int
    seed: int
    length: tuple[int, int]
    clock: int = 0
    queue: list[tuple[int, int, int]] = field(default_factory=list)  # group, duration in polls, poll of arrival
    running: list[tuple[int, int]] = field(default_factory=list)  # group, remaining polls
    tokens: int = 0
    next: int = 0  # the next group
    busy: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    @property
    def held(self) -> int:
        return len({group for group, *_ in self.queue} | {group for group, _ in self.running})

    def step(self, limit: Limit) -> Limit:
        self.clock += 1
        while self.held < limit.groups:
            self.queue += [(self.next, self.random.randint(*self.length), self.clock) for _ in range(GROUP)]
            self.next += 1
        while self.queue and len(self.running) < self.capacity:
            self.running.append(self.queue.pop(0)[:2])
        self.tokens += len(self.running)
        self.busy.append(len(self.running))
        queued = sum((self.clock - came) * POLL_S > QUEUED_S for *_, came in self.queue)
        limit = adjust(limit, Gauges(len(self.running), len(self.queue), queued, 0.0, self.tokens), self.held, BOUNDS)
        self.running = [(group, left - 1) for group, left in self.running if left > 1]
        begun = {group for group, _ in self.running}
        for group in sorted({group for group, *_ in self.queue} - begun, reverse=True)[: max(0, self.held - limit.groups)]:
            self.queue = [waiting for waiting in self.queue if waiting[0] != group]  # the loop hands idle tickets back
        return limit


@pytest.mark.parametrize("capacity", [4, 8, 12, 32, 128, 256])
@pytest.mark.parametrize("start", [1, 64])
@pytest.mark.parametrize("length", [(5, 5), (10, 80), (100, 400)])
def test_an_engine_is_kept_full_with_few_waiting_tickets(capacity: int, start: int, length: tuple[int, int]) -> None:
    """The bounds allow many more claims than the engine can run; the limit must find its capacity."""
    engine, limit, idle = Simulated(capacity, 7, length), Limit(start), []
    for _ in range(2000):
        limit = engine.step(limit)
        idle.append(len(engine.queue))
    late = slice(500, None)
    busy = sum(engine.busy[late]) / len(engine.busy[late]) / capacity
    waiting = sum(idle[late]) / len(idle[late])
    assert busy > 0.98, "the engine ran out of work"
    assert waiting <= GROUP + 1.2 * capacity / SLACK_SHARE, "tickets were idle in it"


def test_a_full_kv_cache_lowers_the_limit_for_a_while() -> None:
    limit = adjust(Limit(16), Gauges(60, 0, 0, KV_FULL, 1), 16, BOUNDS)
    assert (limit.groups, limit.reason) == (12, "kv")
    again = adjust(limit, Gauges(60, 0, 0, KV_FULL, 2), 16, BOUNDS)
    assert again.groups == 12, "the tickets held then are still there"
    for look in range(3, 38):
        limit = adjust(limit, Gauges(40, 0, 0, 0.5, look), 12, BOUNDS)
        assert limit.groups == 12
    for look in range(38, 60):
        limit = adjust(limit, Gauges(40, 0, 0, 0.5 * limit.groups / 12, look), limit.groups, BOUNDS)
    assert 12 < limit.groups <= 12 * KV_ROOM / 0.5


def test_a_long_prefill_does_not_count_as_a_queue() -> None:
    limit = Limit(16)
    for look, queued in enumerate((60, 50, 41, 33, 26, 20, 15, 11, 8, 6, 4, 2, 0)):
        limit = adjust(limit, Gauges(64 - queued, queued, queued, 0.1, look + 1), 16, Bounds(16, 64, GROUP))
    assert limit.groups == 16


def test_bounds_come_from_the_configuration(tmp_path: Path) -> None:
    def bounds(seats: int) -> tuple[int, int]:
        found = Bounds.of(small_config(tmp_path, None, f"generator.max_num_seqs={seats}"))
        return found.most, found.runnable

    assert (bounds(32), bounds(2)) == ((16, 10), (1, 1))
    assert [fair_share(16, generators) for generators in (0, 1, 3, 16, 1000)] == [16, 16, 6, 1, 1]
