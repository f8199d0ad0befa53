"""The distribution of variates; weights and importance weights against explicit formulas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.groups import replay_weights as replay
from services.groups.replay_weights import HEAVIEST, LIGHTEST, sampling_weight
from services.protocol.messages import Header
from tests.support.harness import small_config

N = 20_000


def distance(values: np.ndarray) -> float:
    """Return the Kolmogorov-Smirnov statistic D x sqrt(n) of values [n] against the uniform distribution on 0..1."""
    values, n = np.sort(values), len(values)
    ranks = np.arange(n)
    return max((values - ranks / n).max(), ((ranks + 1) / n - values).max()) * math.sqrt(n)


def drawn(kind: str) -> np.ndarray:
    """Return exponential variates as in a run: of many groups, of many draws of one group, or of many seeds."""
    names = {
        "groups": ((3, f"0-{i}", 0) for i in range(N)),
        "draws": ((3, "0-7", i) for i in range(N)),
        "seeds": ((i, "0-7", 0) for i in range(N)),
    }
    return np.array([replay.exponential(*name) for name in names[kind]])


@pytest.mark.parametrize("kind", ["groups", "draws", "seeds"])
def test_variates_are_exponentially_distributed_and_independent(kind: str) -> None:
    values = drawn(kind)
    assert values.min() > 0
    assert 0.36 < distance(1 - np.exp(-values)) < 1.95  # probability 0.001 in either tail of Kolmogorov's distribution
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 3.3 / math.sqrt(N)
    assert len(set(values.tolist())) == N


def test_victims_are_uniform_and_independent_of_the_clocks() -> None:
    values = np.array([replay.uniform(3, f"0-{i}", "victim") for i in range(N)])
    assert 0 < values.min() < values.max() < 1
    assert 0.36 < distance(values) < 1.95
    assert abs(np.corrcoef(values, drawn("groups"))[0, 1]) < 3.3 / math.sqrt(N)


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
def test_extreme_random_bits_stay_within_the_interval(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variate of 0 would be rejected by the server, and log(0) would end the process."""
    monkeypatch.setattr(replay, "drawn", lambda *_: bits)
    assert 0.0 < replay.uniform(3, "0-1", "victim") < 1.0
    assert 0.0 < replay.exponential(3, "0-1", 0) < 40.0


def test_a_variate_is_a_function_of_seed_group_and_draw() -> None:
    assert replay.exponential(1, "0-1", 2) == replay.exponential(1, "0-1", 2)
    assert (
        len({replay.exponential(*name) for name in [(1, "0-1", 2), (2, "0-1", 2), (1, "0-2", 2), (1, "0-1", 3), (1, "0-12", 0)]})
        == 5
    )


weights = st.lists(st.sampled_from([0.0, 1e-9, 1e9]) | st.floats(1e-6, 1e6), min_size=1, max_size=12)


@given(weights, st.floats(1e-9, 1e9), st.integers(0, 1000), st.floats(0, 1))
def test_importance_weights_match_their_definition(w: list[float], rest: float, others: int, beta: float) -> None:
    total, size = math.fsum(w) + rest, len(w) + others
    given_ = replay.importance(w, beta)
    assert given_.shape == (len(w),)
    assert given_.max() == 1.0
    assert given_.min() > 0
    positive = [x for x in w if x > 0]
    if not positive:
        assert given_.tolist() == [1.0] * len(w)
        return
    powers = [(size * (x or min(positive)) / total) ** -beta for x in w]
    assert given_.tolist() == pytest.approx([power / max(powers) for power in powers], rel=1e-9)


def test_importance_weights_match_hand_computed_values() -> None:
    # If the weights sum to 8: P = 1/2, 1/8, and a group of weight 0, which counts as the lightest of the others.
    assert replay.importance([4.0, 1.0, 0.0], 1.0).tolist() == [0.25, 1.0, 1.0]
    assert replay.importance([4.0, 1.0, 0.0], 0.5).tolist() == [0.5, 1.0, 1.0]
    assert replay.importance([0.5, 0.125], 1.0).tolist() == [0.25, 1.0]
    assert replay.importance([4.0, 1.0], 0.0).tolist() == [1.0, 1.0]
    assert replay.importance([0.0, 0.0], 1.0).tolist() == [1.0, 1.0]
    assert replay.importance([], 1.0).tolist() == []


def test_importance_weights_correct_unequal_probabilities() -> None:
    """With a beta of 1 and single draws, every group counts equally on average."""
    w, random = np.array([8.0, 4.0, 2.0, 1.0, 1.0]), np.random.default_rng(1)
    corrected = replay.importance(w.tolist(), 1.0)
    shares = np.bincount(random.choice(5, 100_000, p=w / 16), minlength=5) * corrected
    assert shares / shares.mean() == pytest.approx(np.ones(5), rel=0.05)


def header(oldest: int = 0, **fields: Any) -> Header:
    given_ = Header(
        "0-1", 1, 0, 1, "0-1.1", 100, 2, [2] * 4, [0.0, 1.0, 0.0, 1.0], {"exact": [0.0, 1.0, 0.0, 1.0]}, [False] * 4,
        [oldest] * 4, [oldest] * 4, "g", 0.1, 0.1, "main", [0] * 4,
    )  # fmt: skip
    return msgspec.structs.replace(given_, **fields)


def test_recency_weights_halve_per_version_within_bounds() -> None:
    for step in range(0, 500, 7):
        base = replay.recency_base(step)
        assert base <= step
        youngest = replay.recency_weight(step - base)
        assert 1.0 <= youngest <= 2.0**replay.HALVINGS
        assert youngest / replay.recency_weight(step - base - 1) == 2.0


def test_the_recency_base_never_decreases() -> None:
    bases = [replay.recency_base(step) for step in range(1000)]
    assert bases == sorted(bases)
    assert len(set(bases)) == 1000 // 16 + 1


@pytest.mark.parametrize("version", [0, 10**6, 2**62])
def test_a_header_of_any_version_has_a_valid_weight(tmp_path: Path, version: int) -> None:
    config = small_config(tmp_path, None, "replay.sampler=prioritized", "replay.priority=recency")
    assert 0 <= replay.weight(header(version), np.zeros(4), config, 48) <= HEAVIEST


def test_recency_counts_versions_from_the_base(tmp_path: Path) -> None:
    config = small_config(tmp_path, None, "replay.sampler=prioritized", "replay.priority=recency")
    mixed = msgspec.structs.replace(header(), oldest=[52, 50, 51, 53])
    assert replay.weight(mixed, np.zeros(4), config, 48) == 4.0
    assert replay.weight(header(44), np.zeros(4), config, 48) == 0.0625


def test_sampling_weights_are_bounded_priorities() -> None:
    bounded = {0.0: 0.0, -1.0: 0.0, 1e-8: 1e-8, LIGHTEST / 2: 0.0, 3.0: 3.0, 1e10: HEAVIEST, math.inf: HEAVIEST}
    assert {priority: sampling_weight(priority) for priority in bounded} == bounded
    assert sampling_weight(math.nan) == 0.0


def test_weights_come_from_advantages_or_rewards(tmp_path: Path) -> None:
    given_, truncated = np.array([-1.0, 1.0, -2.0, 2.0]), [False, False, True, True]
    advantage = small_config(tmp_path, None, "replay.sampler=prioritized")
    assert replay.weight(header(truncated=truncated), given_, advantage, 0) == pytest.approx(6.0)
    masked = small_config(tmp_path, None, "replay.sampler=prioritized", "advantage.mask_truncated=true")
    assert replay.weight(header(truncated=truncated), given_, masked, 0) == pytest.approx(2.0)
    reward = small_config(tmp_path, None, "replay.sampler=prioritized", "replay.priority=reward")
    assert replay.weight(header(), given_, reward, 0) == pytest.approx(2.0)
    assert replay.weight(header(rewards=[-1.0, 0.5, 0.0, 0.0]), given_, reward, 0) == 0.0
    assert replay.weight(header(rewards=[1e308] * 4), given_, reward, 0) == pytest.approx(HEAVIEST)
