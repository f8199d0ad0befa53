"""Advantages, by hand and against a slow second implementation."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.config.training import Advantage
from services.groups.advantages import Kind, advantages, equal, trained

rewards = st.lists(st.floats(0, 10).map(lambda x: round(x, 3)), min_size=2, max_size=16)


def _slow(r: list[float], kind: str) -> list[float]:
    mean = sum(r) / len(r)
    std = math.sqrt(sum((x - mean) ** 2 for x in r) / len(r))
    result = []
    for i, x in enumerate(r):
        others = [y for j, y in enumerate(r) if j != i]
        result.append(
            {
                "centered": x - mean,
                "standard": (x - mean) / (std + 1e-8),
                "maxrl": (x - mean) / mean if mean else 0.0,
                "rloo": x - sum(others) / len(others),
            }[kind]
        )
    return result


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("centered", [0.5, -0.5, 0.5, -0.5]),
        ("standard", [1.0, -1.0, 1.0, -1.0]),  # population std 0.5
        ("maxrl", [1.0, -1.0, 1.0, -1.0]),
        ("rloo", [2 / 3, -2 / 3, 2 / 3, -2 / 3]),
    ],
)
def test_advantages_match_hand_computed_values(kind: Kind, expected: list[float]):
    assert advantages([1, 0, 1, 0], kind) == pytest.approx(expected, rel=1e-7)


def test_a_tiny_spread_is_divided_by_the_standard_deviation_and_epsilon():
    assert advantages([0.0, 2e-8], "standard") == pytest.approx([-0.5, 0.5])


@given(rewards, st.sampled_from(get_args(Kind)))
def test_advantages_match_the_slow_twin(r: list[float], kind: Kind):
    assert advantages(r, kind) == pytest.approx(_slow(r, kind), rel=1e-6, abs=1e-6)


@given(st.integers(2, 16).flatmap(lambda n: st.lists(st.lists(st.floats(-10, 10), min_size=n, max_size=n), min_size=1)))
@pytest.mark.parametrize("kind", get_args(Kind))
def test_batched_groups_get_the_advantages_of_each(kind: Kind, groups: list[list[float]]):
    assert advantages(np.array(groups), kind).tolist() == [advantages(group, kind).tolist() for group in groups]


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("value", [0.0, 0.1, 1.0, 1e6 / 3, -1e300])
def test_a_constant_group_has_zero_advantages(kind: Kind, value: float):
    assert advantages([value] * 7, kind).tolist() == [0.0] * 7


def test_maxrl_never_flips_the_sign():
    assert advantages([-1.0, -3.0], "maxrl").tolist() == [0.0, 0.0]
    assert advantages([0.0, 0.0], "maxrl").tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["centered", "standard", "rloo"])
def test_a_large_common_offset_loses_no_precision(kind: Kind):
    """Rewards are exact in float64, as are their differences."""
    small = [0.25, 0.5, 0.0, 1.0]
    assert advantages([2.0**16 + x for x in small], kind) == pytest.approx(advantages(small, kind), rel=1e-12)


@pytest.mark.parametrize("kind", ["centered", "standard", "maxrl", "rloo"])
def test_rewards_that_differ_by_rounding_are_equal(kind: Kind):
    groups = [[0.1 + 0.2, 0.3, 0.3, 0.3], [1.0, 1.0, 1.0, 1.0000001], [1e9, 1e9 + 1, 1e9, 1e9], [-5.0, -5.0, -5.0, -5.000001]]
    assert [advantages(rewards, kind).tolist() for rewards in groups] == [[0.0] * 4] * 4
    assert advantages([*groups[:1], [0.0, 1.0, 0.0, 0.0]], kind)[1].any()
    assert equal(groups).all()
    assert not equal([[0.0, 1e-9, 0.0], [1.0, 1.00001, 1.0], [1.0, -1.0, 1.0]]).any()


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16))
def test_maxrl_is_bounded_for_rewards_of_both_signs(r: list[float]):
    found = advantages(r, "maxrl")
    assert ((found >= -1) & (found <= len(r) - 1)).all()
    if min(r) >= 0 and (mean := sum(r) / len(r)) > 1e-300 and min(r) < max(r):
        assert found == pytest.approx([(x - mean) / mean for x in r], rel=1e-6, abs=1e-6), "the bounds must not change anything"


def test_maxrl_near_a_mean_of_zero_matches_hand_computed_values():
    assert advantages([1.0, -1.0 + 1e-9], "maxrl").tolist() == [1.0, -1.0]  # 2e9 and -2e9 unbounded


def test_statistics_are_those_of_the_full_group():
    # A 2x2 group with one truncated completion: the survivors keep the advantages of the full group.
    assert advantages([1.0, 0.0, 1.0, 0.0], "standard") == pytest.approx([1, -1, 1, -1], rel=1e-7)
    assert trained([False, True, False, False], mask_truncated=True).tolist() == [True, False, True, True]
    assert trained([False, True, False, False], mask_truncated=False).tolist() == [True] * 4


def test_invalid_rewards_are_rejected():
    with pytest.raises(ValueError, match="must be finite"):
        advantages([1.0, np.nan], "centered")
    with pytest.raises(ValueError, match="at least 2"):
        advantages([1.0], "rloo")


def test_kinds_match_the_configuration():
    assert get_args(Kind) == get_args(Advantage.model_fields["kind"].annotation)
