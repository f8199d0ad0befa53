"""The rate limiter against Reverb's published rule."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from services.dataprep.replay.rate_limiter import RateLimiter, rate_limiter
from tests.support.harness import small_config

EDGE = 1e-6  # rounding decides if a value is closer to a bound than this


@dataclass
class SampleToInsertRatio:
    """Cassirer et al. 2021, section 3.3: inserts x ratio - samples stays within min_diff..max_diff. Without deletes."""

    ratio: float
    min_size: int
    error_buffer: float

    @property
    def min_diff(self) -> float:
        return self.ratio * self.min_size - self.error_buffer

    @property
    def max_diff(self) -> float:
        return self.ratio * self.min_size + self.error_buffer

    def diff(self, inserts: int, samples: int) -> float:
        return inserts * self.ratio - samples

    def can_sample(self, inserts: int, samples: int, count: int) -> bool | None:
        return _clear(self.diff(inserts, samples + count) - self.min_diff)

    def can_insert(self, inserts: int, samples: int, count: int) -> bool | None:
        return _clear(self.max_diff - self.diff(inserts + count, samples))


def _clear(room: float) -> bool | None:
    return None if abs(room) < EDGE else room > 0


ratios, sizes, steps, errors = st.floats(1, 8), st.integers(1, 64), st.integers(1, 32), st.floats(1, 5)


@given(ratios, sizes, st.floats(0, 200), st.integers(0, 5000), st.integers(0, 20_000), steps)
def test_decisions_match_reverb(ratio: float, size: int, error: float, inserts: int, samples: int, count: int) -> None:
    ours, theirs = RateLimiter(ratio, size, error), SampleToInsertRatio(ratio, size, error)
    assert theirs.can_sample(inserts, samples, count) in (None, ours.draws(inserts, samples, count))
    allowed = ours.inserts(inserts, samples)
    assert theirs.can_insert(inserts, samples, allowed) is not False or allowed == 0
    assert theirs.can_insert(inserts, samples, allowed + 1) is not True


@given(ratios, sizes, steps, errors, st.integers(0, 2000), st.integers(0, 10_000))
def test_draws_and_inserts_are_never_both_blocked(
    ratio: float, size: int, count: int, error: float, inserts: int, samples: int
) -> None:
    limiter = RateLimiter(ratio, size, (count + ratio) / 2 * error)
    assert limiter.draws(inserts, samples, count) or limiter.inserts(inserts, samples) > 0


@given(ratios, sizes, steps, errors, st.integers(0, 2**32))
def test_any_order_of_calls_stays_within_the_buffer_and_continues(
    ratio: float, size: int, count: int, error: float, seed: int
) -> None:
    limiter, dice = RateLimiter(ratio, size, (count + ratio) / 2 * error), random.Random(seed)
    rule, inserts, samples = SampleToInsertRatio(ratio, size, limiter.error_buffer), 0, 0
    eager = dice.choice(["draws", "inserts", "either"])
    reached = False
    for _ in range(300):
        first = eager == "draws" or (eager == "either" and dice.random() < 0.5)
        drawing = limiter.draws(inserts, samples, count) if first else not limiter.inserts(inserts, samples)
        samples, inserts = (samples + count, inserts) if drawing else (samples, inserts + 1)
        reached = reached or rule.diff(inserts, samples) >= rule.min_diff
        assert rule.diff(inserts, samples) <= rule.max_diff + EDGE
        assert not reached or rule.diff(inserts, samples) >= rule.min_diff - EDGE


def test_only_a_ratio_creates_a_limiter_with_the_least_buffer(tmp_path: Path) -> None:
    assert rate_limiter(small_config(tmp_path)) is None
    config = ("replay.sampler=uniform", "replay.max_uses=0", "replay.samples_per_insert=3", "replay.min_size=4")
    assert rate_limiter(small_config(tmp_path, None, *config)) == RateLimiter(3.0, 4, (8 + 3) / 2)
