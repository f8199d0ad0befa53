"""Priorities of groups, by hand and against a slow twin, for any layout of rows and ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.protocol.messages import RankPlan, Sample
from services.protocol.payloads import Payload
from services.trainer.step import batches, priorities


def _payload(lengths: list[int], excluded: tuple[int, ...] = (), tools: tuple[tuple[int, int, int], ...] = ()) -> Payload:
    count = sum(lengths)
    logprobs = np.full(count, -1.0, np.float32)
    logprobs[list(excluded)] = np.nan
    return Payload(
        np.array([1, 2], np.int32), np.array(lengths, np.int32), np.zeros(count, np.int32), logprobs, np.zeros((0, 4), np.int32),
        np.array(tools, np.int32).reshape(-1, 3),
    )  # fmt: skip


def _rows(layout: list[list[Sample]], payloads: dict[str, Payload]) -> list[batches.Row]:
    return batches.build(RankPlan(layout), payloads, vocabulary=8, row_tokens=10_000)


def test_priorities_match_hand_computed_values() -> None:
    # Completion 0: |A| = 2, three of its four tokens learn. 1: |A| = 0.5, of four tokens one is a tool's and one excluded, and
    # one of the other two learns. 2 is masked, 3 all tool tokens, 4 all excluded.
    payload = _payload([4, 4, 3, 2, 2], excluded=(5, 13, 14), tools=((1, 0, 1), (3, 0, 2)))
    samples = [Sample("0-7.3", i, advantage, n) for i, (advantage, n) in enumerate([(-2.0, 4), (0.5, 3), (1, 0), (1, 0), (1, 2)])]
    (row,) = _rows([samples], {"0-7.3": payload})
    learning = torch.tensor([True, True, True, False, False, True, False, False, False])
    parts = priorities.of_rows([row], [learning])
    pairs = [(6.0, 4.0), (0.5, 2.0), (0, 0), (0, 0), (0, 0)]
    assert parts == {("0-7.3", rollout): [pair] for rollout, pair in enumerate(pairs)}
    assert priorities.join([parts]) == {"0-7": 1.75}


def test_groups_are_summed_over_ranks_and_all_are_listed() -> None:
    first = {("0-1.1", 0): [(1.0, 2.0)], ("0-2.1", 0): [(0.0, 0.0)]}
    second = {("0-1.1", 1): [(0.5, 2.0)], ("0-1.1", 2): [(1.0, 1.0)]}
    assert priorities.join([first, {}, second]) == {"0-1": 1.75, "0-2": 0.0}
    assert priorities.join([{}]) == {}


@pytest.mark.parametrize(("payload", "group"), [("0-7.3", "0-7"), ("a.b-12-9.41", "a.b-12-9")])
def test_a_groups_name_is_its_payloads_up_to_the_last_dot(payload: str, group: str) -> None:
    assert priorities.group_of(payload) == group


token = st.tuples(st.booleans(), st.booleans())  # counted, still to be learnt
completion = st.tuples(st.floats(-3, 3, width=32), st.lists(token, max_size=6))
step = st.lists(st.lists(completion, min_size=1, max_size=4), min_size=1, max_size=4)


@given(step, st.data())
def test_any_layout_matches_the_twin(groups: list[list[tuple[float, list[tuple[bool, bool]]]]], data: st.DataObject) -> None:
    payloads, samples, learnt, expected = {}, [], [], {}
    for number, group in enumerate(groups):
        name = f"0-{number}.1"
        tokens = [token for _, completion in group for token in completion]
        payloads[name] = _payload(
            [len(completion) for _, completion in group], tuple(i for i, t in enumerate(tokens) if not t[0])
        )
        samples += [Sample(name, i, advantage, len(completion)) for i, (advantage, completion) in enumerate(group)]
        learnt += [[counted and open for counted, open in completion] for _, completion in group]
        expected[f"0-{number}"] = math.fsum(
            abs(advantage)
            * sum(counted and open for counted, open in completion)
            / max(1, sum(counted for counted, _ in completion))
            for advantage, completion in group
        )
    ranks: list[list[list[int]]] = [[[], []], [[], []]]  # [rank][row]
    for number in data.draw(st.permutations(range(len(samples)))):
        data.draw(st.sampled_from([row for rank in ranks for row in rank])).append(number)
    parts = []
    for rank in ranks:
        rows = _rows([[samples[i] for i in row] for row in rank], payloads)
        masks = [torch.tensor([t for i in row for t in learnt[i]], dtype=torch.bool) for row in rank]
        parts.append(priorities.of_rows(rows, masks))
    found = priorities.join(parts)
    assert list(found) == sorted(expected)
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert found == priorities.join(reversed(parts)), "the order of ranks does not matter"
