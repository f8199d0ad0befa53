"""Rows by hand, and every way a payload can fail to fit its plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.protocol.messages import Payload, RankPlan, Sample
from services.trainer import batches
from services.trainer.batches import PlanMismatch


def _payload(**changes: np.ndarray) -> Payload:
    columns = {
        "prompt": np.array([10, 11], np.int32),
        "lengths": np.array([2, 0, 3], np.int32),
        "tokens": np.array([20, 21, 30, 31, 32], np.int32),
        "logprobs": np.array([-1, -2, -3, -4, -5], np.float32),
        "spans": np.zeros((0, 4), np.int32),
    }
    return Payload(**(columns | changes))


def _build(rows: list[list[Sample]], payload: Payload | None = None, row_tokens: int = 100) -> list[batches.Row]:
    return batches.build(RankPlan(rows), {"a": payload or _payload()}, vocabulary=40, row_tokens=row_tokens)


def test_a_row_by_hand() -> None:
    (row,) = _build([[Sample("a", 2, 0.5, 3), Sample("a", 0, -1.0, 2)]])
    assert row.samples == (("a", 2), ("a", 0))
    assert row.input_ids.tolist() == [10, 11, 30, 31, 32, 10, 11, 20, 21]
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert row.packing.cu_seqlens.tolist() == [0, 5, 9]
    assert row.predictors.tolist() == [1, 2, 3, 6, 7]
    assert row.targets.tolist() == [30, 31, 32, 20, 21]
    assert row.behaviour.tolist() == [-3, -4, -5, -1, -2]
    assert row.advantages.tolist() == [0.5, 0.5, 0.5, -1, -1]
    assert row.sample_of_token.tolist() == [0, 0, 0, 1, 1]


def test_a_masked_response_lies_in_the_row_without_targets() -> None:
    (row,) = _build([[Sample("a", 2, 0.5, 0), Sample("a", 1, 1.0, 0), Sample("a", 0, -1.0, 2)]])
    assert len(row.input_ids) == 5 + 2 + 4
    assert row.targets.tolist() == [20, 21]
    assert row.predictors.tolist() == [8, 9]
    assert row.sample_of_token.tolist() == [2, 2]


def test_an_empty_row_is_one_token_without_target() -> None:
    full, empty = _build([[Sample("a", 0, 1.0, 2)], []])
    assert len(full.targets) == 2
    assert (len(empty.input_ids), len(empty.targets), empty.packing.cu_seqlens.tolist()) == (1, 0, [0, 1])


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=4))
def test_every_planned_token_is_a_target_once(layout: list[list[int]]) -> None:
    payload = _payload()
    rows = [[Sample("a", index, 1.0, int(payload.lengths[index])) for index in row] for row in layout]
    for planned, row in zip(rows, _build(rows), strict=True):
        assert len(row.targets) == sum(sample.trained_tokens for sample in planned)
        assert torch.equal(row.input_ids[row.predictors + 1], row.targets)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (Sample("b", 0, 1.0, 2), "payload b is in the plan but was not fetched"),
        (Sample("a", 3, 1.0, 2), "does not exist: the group has 3"),
        (Sample("a", -1, 1.0, 2), "does not exist"),
        (Sample("a", 0, 1.0, 1), "has 2 tokens, but the plan trains 1"),
        (Sample("a", 0, float("nan"), 2), "has the advantage nan"),
    ],
)
def test_a_plan_that_does_not_fit(sample: Sample, message: str) -> None:
    with pytest.raises(PlanMismatch, match=message):
        _build([[sample]])


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("tokens", np.array([1, 2], np.int32), "lengths add up to 5, but there are 2 tokens"),
        ("logprobs", np.zeros(4, np.float32), "and 4 logprobs"),
        ("logprobs", np.zeros(5, np.int32), "logprobs is int32"),
        ("prompt", np.zeros((1, 1), np.int32), "of 2 dimensions"),
        ("lengths", np.array([6, -1, 0], np.int32), "lengths add up to"),
        ("prompt", np.zeros(0, np.int32), "the prompt is empty"),
        ("prompt", np.array([40], np.int32), "do not fit a vocabulary of 40"),
        ("tokens", np.array([1, 2, 3, 4, -5], np.int32), "do not fit"),
    ],
)
def test_a_payload_that_does_not_fit(column: str, value: np.ndarray, message: str) -> None:
    with pytest.raises(PlanMismatch, match=message):
        _build([[Sample("a", 0, 1.0, 2)]], _payload(**{column: value}))


def test_a_row_beyond_the_budget() -> None:
    with pytest.raises(PlanMismatch, match=r"a row of 8 tokens exceeds trainer\.row_tokens = 7"):
        _build([[Sample("a", 0, 1.0, 2)] * 2], row_tokens=7)
