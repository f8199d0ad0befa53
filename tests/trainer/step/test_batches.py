"""Rows by hand, and every way in which a payload may not match its plan."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.protocol.errors import Damaged
from services.protocol.messages import RankPlan, Sample
from services.protocol.payloads import Payload
from services.trainer.step import batches
from services.trainer.step.batches import PlanMismatch


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


def test_a_row_matches_a_hand_computed_one() -> None:
    (row,) = _build([[Sample("a", 2, 0.5, 3), Sample("a", 0, -1.0, 2)]])
    assert row.samples == (("a", 2), ("a", 0))
    assert row.input_ids.tolist() == [10, 11, 30, 31, 32, 20, 21]
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 2, 3]
    assert row.packing.own.tolist() == [0, 5, 7]
    assert row.packing.sequences.tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 6]
    assert row.predictors.tolist() == [1, 2, 3, 1, 5]
    assert row.targets.tolist() == [30, 31, 32, 20, 21]
    assert row.behaviour.tolist() == [-3, -4, -5, -1, -2]
    assert row.advantages.tolist() == [0.5, 0.5, 0.5, -1, -1]
    assert row.sample_of_token.tolist() == [0, 0, 0, 1, 1]


def test_a_masked_response_stays_in_the_row_without_targets() -> None:
    (row,) = _build([[Sample("a", 2, 0.5, 0), Sample("a", 1, 1.0, 0), Sample("a", 0, -1.0, 2)]])
    assert row.input_ids.tolist() == [10, 11, 30, 31, 32, 20, 21]
    assert row.targets.tolist() == [20, 21]
    assert row.predictors.tolist() == [1, 5]
    assert row.sample_of_token.tolist() == [2, 2]


def _with_tools(*spans: tuple[int, int, int]) -> Payload:
    return _payload(tool_spans=np.array(spans, np.int32).reshape(-1, 3))


def test_tool_tokens_are_context_and_never_targets() -> None:
    (row,) = _build([[Sample("a", 2, 0.5, 2, 0.25), Sample("a", 0, -1.0, 1, 0.0)]], _with_tools((2, 1, 2), (0, 0, 1)))
    assert row.input_ids.tolist() == [10, 11, 30, 31, 32, 20, 21]
    assert row.predictors.tolist() == [1, 3, 5]
    assert row.targets.tolist() == [30, 32, 21]
    assert row.behaviour.tolist() == [-3, -5, -2]
    assert row.advantages.tolist() == [0.5, 0.5, -1]
    assert row.weights.tolist() == [0.25, 0.25, 0]
    assert row.sample_of_token.tolist() == [0, 0, 1]


def test_a_completion_of_tool_tokens_only_trains_nothing() -> None:
    (row,) = _build([[Sample("a", 2, 0.5, 0), Sample("a", 0, -1.0, 2)]], _with_tools((2, 2, 3), (2, 0, 2)))
    assert len(row.input_ids) == 5 + 2
    assert (row.targets.tolist(), row.sample_of_token.tolist()) == ([20, 21], [1, 1])


def test_an_empty_row_is_one_token_without_a_target() -> None:
    full, empty = _build([[Sample("a", 0, 1.0, 2)], []])
    assert len(full.targets) == 2
    assert (empty.input_ids.tolist(), empty.positions.tolist(), empty.packing.whole.tolist()) == ([0], [0], [0, 1])
    for name in ("predictors", "targets", "behaviour", "advantages", "weights", "sample_of_token"):
        mine, others = getattr(empty, name), getattr(full, name)
        assert (mine.shape, mine.dtype) == ((0,), others.dtype), name


@given(st.lists(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2)), max_size=8), max_size=4))
def test_every_planned_token_is_a_target_once_after_its_context(layout: list[list[tuple[str, int]]]) -> None:
    payloads = {"a": _payload(), "b": _payload(prompt=np.array([12], np.int32), tokens=np.array([1, 2, 3, 4, 5], np.int32))}
    plan = RankPlan([[Sample(name, index, 1.0, int(payloads[name].lengths[index])) for name, index in row] for row in layout])
    for planned, row in zip(plan.rows, batches.build(plan, payloads, vocabulary=40, row_tokens=100), strict=True):
        if not planned:
            continue
        expected, before = [], set()
        for sample in planned:
            payload = payloads[sample.payload]
            begin = int(payload.lengths[: sample.index].sum())
            response = payload.tokens[begin : begin + sample.trained_tokens].tolist()
            if response or sample.payload not in before:
                expected.append((payload.prompt.tolist(), response))
            before.add(sample.payload)
        ends = row.packing.whole.tolist()
        places = [row.packing.sequences[begin:end] for begin, end in itertools.pairwise(ends)]
        assert [row.input_ids[of].tolist() for of in places] == [prompt + response for prompt, response in expected]
        assert all(row.positions[of].tolist() == list(range(len(of))) for of in places)
        predictors = [of[len(prompt) - 1 : -1] for of, (prompt, _) in zip(places, expected, strict=True)]
        assert row.predictors.tolist() == torch.cat(predictors).tolist()
        assert row.targets.tolist() == [token for _, response in expected for token in response]
        assert len(row.input_ids) == len(set(row.packing.sequences.tolist())), "a prompt is in the row once"


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (Sample("a", 3, 1.0, 2), "index 3 is out of bounds"),
        (Sample("a", 0, 1.0, 1), "completion 0 has 2 sampled tokens, but the plan trains 1"),
        (Sample("a", 0, 1.0, -1), "but the plan trains -1"),
    ],
)
def test_a_payload_that_contradicts_the_plan_is_rejected(sample: Sample, message: str) -> None:
    with pytest.raises(Damaged, match=f"payload a: .*{message}"):
        _build([[sample]])


def test_all_damaged_payloads_are_named_at_once() -> None:
    rows, fine, empty = [[Sample(name, 0, 1.0, 2)] for name in "abc"], _payload(), _payload(prompt=np.zeros(0, np.int32))
    with pytest.raises(Damaged) as raised:
        batches.build(RankPlan(rows), {"a": empty, "b": fine, "c": empty}, vocabulary=40, row_tokens=100)
    assert raised.value.reasons.keys() == {"a", "c"}


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("tokens", np.array([1, 2], np.int32), "lengths add up to 5, but there are 2 tokens"),
        ("logprobs", np.zeros(4, np.float32), "and 4 logprobs"),
        ("logprobs", np.zeros(5, np.int32), "logprobs is int32"),
        (
            "logprobs",
            np.array([-1, 0.2, 0, 0, 0], np.float32),
            r"a behaviour logprob is 0\.2, outside the valid range -1000\.\.0",
        ),
        ("logprobs", np.array([-1, 0, -3e38, 0, 0], np.float32), "a behaviour logprob is -3e\\+38"),
        ("prompt", np.zeros((1, 1), np.int32), "of 2 dimensions"),
        ("lengths", np.array([6, -1, 0], np.int32), "lengths add up to"),
        ("prompt", np.zeros(0, np.int32), "the prompt is empty"),
        ("prompt", np.array([40], np.int32), "do not fit a vocabulary of 40"),
        ("tokens", np.array([1, 2, 3, 4, -5], np.int32), "do not fit"),
    ],
)
def test_a_malformed_payload_is_rejected(column: str, value: np.ndarray, message: str) -> None:
    with pytest.raises(Damaged, match=message):
        _build([[Sample("a", 0, 1.0, 2)]], _payload(**{column: value}))


def test_invalid_logprobs_of_tool_tokens_are_ignored() -> None:
    payload = _with_tools((2, 0, 2))
    payload.logprobs[:] = [np.nan, 0.05, 3e38, -3e38, -np.inf]
    (row,) = _build([[Sample("a", 2, 1.0, 1), Sample("a", 0, 1.0, 2)]], payload)
    assert row.behaviour[:1].tolist() == [-np.inf]


def test_a_plan_without_the_tool_tokens_is_rejected() -> None:
    with pytest.raises(Damaged, match=r"payload a: completion 2 has 1 sampled tokens, but the plan trains 3"):
        _build([[Sample("a", 2, 1.0, 3)]], _with_tools((2, 0, 2)))


def test_a_row_beyond_the_budget_is_rejected() -> None:
    with pytest.raises(PlanMismatch, match=r"a row of 6 tokens exceeds trainer\.row_tokens = 5"):
        _build([[Sample("a", 0, 1.0, 2)] * 2], row_tokens=5)
