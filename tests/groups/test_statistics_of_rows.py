"""Metrics of packed rows, by hand and against what the trainer builds from a plan."""

from __future__ import annotations

import pytest

from services.groups.group_statistics import of_rows, tokens
from services.protocol.messages import RankPlan, Sample


def _sample(
    payload: str, index: int, advantage: float = 1.0, *, trained: int = 6, context: int = 0, weight: float = 1.0
) -> Sample:
    return Sample(payload, index, advantage, trained, weight, tokens=10, context_tokens=4, context=context)


def test_shared_contexts_count_once_per_row_and_empty_rows_count() -> None:
    row = [_sample("a", 0), _sample("a", 1), _sample("a", 2, context=1), _sample("b", 0)]
    assert tokens(row) == (4 + 6 + 6) + (4 + 6) + (4 + 6)
    record = of_rows([RankPlan([row, [_sample("a", 3)]]), RankPlan([[_sample("b", 1)], []])], 40, 2)
    assert record["rows/train/packed_ratio"] == pytest.approx((36 + 10 + 10) / 160)


def test_only_groups_with_a_nonzero_advantage_count() -> None:
    row = [
        *(_sample("learns", 0, advantage=a) for a in (0.0, -0.5)),
        _sample("equal", 0, 0.0),
        _sample("masked", 0, trained=0),
        _sample("weightless", 0, weight=0.0),
    ]
    assert of_rows([RankPlan([row])], 100, 8)["groups/train/real_batch_size_ratio"] == 1 / 8


def test_a_step_that_lost_all_its_groups_has_no_ratio() -> None:
    assert of_rows([RankPlan([[], []])], 40, 2) == {}
