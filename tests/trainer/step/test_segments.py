"""Rollouts of several segments: exactly the sampled tokens are packed, and a row computes what single segments do."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.dataprep.planning.plan import Layout, plan_step
from services.groups.generated import Segment
from services.protocol.errors import Damaged
from services.protocol.messages import RankPlan
from services.trainer.model import policy_network as model
from services.trainer.model.attention.packing import Packing, RowTokens
from services.trainer.step import batches, denominators, priorities
from services.trainer.step.discard_damaged import without
from tests.support.models.segmented import PROMPT, VOCABULARY, Drawn, Made, groups, make
from tests.support.models.tiny_model import make_config

ROW_TOKENS = 40


def _made(drawn: list[list[list[Drawn]]]) -> list[Made]:
    return [make(number, group) for number, group in enumerate(drawn)]


def _build(plan: RankPlan, made: list[Made]) -> list[batches.PackedRow]:
    payloads = {one.name: one.payload for one in made}
    return batches.build(plan, payloads, vocabulary=VOCABULARY, row_tokens=ROW_TOKENS)


def _sequences(row: batches.PackedRow) -> list[list[int]]:
    ends = row.packing.whole.tolist()
    return [row.input_ids[row.packing.sequences[a:b]].tolist() for a, b in itertools.pairwise(ends)]


def _whole(one: Segment) -> list[int]:
    return [*(one.context.tolist() or PROMPT), *one.completion.tokens.tolist()]


def _sampled(one: Segment) -> list[int]:
    """Return the positions of a segment's tokens that the policy sampled."""
    tools = {place for start, end in one.completion.tool_spans for place in range(start, end)}
    return [place for place in range(len(one.completion.tokens)) if place not in tools]


@given(groups, st.integers(1, 3), st.integers(1, 2), st.booleans())
@settings(max_examples=40, deadline=None)
def test_any_plan_trains_exactly_the_sampled_tokens(
    drawn: list[list[list[Drawn]]], ranks: int, mini_batches: int, same_rows: bool
) -> None:
    made = _made(drawn)
    layout = Layout(ranks, ROW_TOKENS, mini_batches, "sequence", same_rows=same_rows)
    plan, of_ranks = plan_step(0, [one.plan_group(masked=[1]) for one in made], layout)
    by_name = {one.name: one for one in made}
    found, sequences = [], []
    for rank in of_ranks:
        for samples, row in zip(rank.rows, _build(rank, made), strict=True):
            assert [sample.response for sample in samples] == list(row.samples)
            sequences += _sequences(row) if samples else []
            contexts = {(s.payload, s.context): s.context_tokens for s in samples}
            size = sum(contexts.values()) + sum(s.tokens - s.context_tokens for s in samples)
            assert len(row.input_ids) == max(1, size), "a row holds each context once"
            for number, sample in enumerate(samples):
                mine = row.sample_of_token == number
                rollout, one = by_name[sample.payload].segments[sample.index]
                trained = [] if rollout == 1 else _sampled(one)
                assert row.targets[mine].tolist() == one.completion.tokens[trained].tolist()
                assert row.behaviour[mine].tolist() == one.completion.logprobs[trained].tolist()
                assert row.advantages[mine].tolist() == [rollout + 0.5] * len(trained)
                found.append((sample.payload, sample.index))
    assert sorted(found) == sorted((one.name, i) for one in made for i in range(len(one.segments)))
    assert sorted(sequences) == sorted(_whole(one) for each in made for _, one in each.segments)
    in_loss = {(one.name, rollout) for one in made for rollout, each in one.segments if rollout != 1 and _sampled(each)}
    assert len(in_loss) <= sum(plan.denominators) <= len(in_loss) + len(plan.denominators)
    assert plan.total_tokens == sum(len(_whole(one)) for each in made for _, one in each.segments)


@given(groups)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_row_matches_its_segments_computed_alone(tiny_model: Path, drawn: list[list[list[Drawn]]]) -> None:
    scorer, made = _scorer(tiny_model), _made(drawn)
    _, (rank,) = plan_step(0, [one.plan_group() for one in made], Layout(1, ROW_TOKENS))
    by_name = {one.name: one for one in made}
    packed: dict[tuple[str, int], torch.Tensor] = {}
    for samples, row in zip(rank.rows, _build(rank, made), strict=True):
        logprobs = scorer(row)[0]
        for number, sample in enumerate(samples):
            packed[sample.payload, sample.index] = logprobs[row.sample_of_token == number]
    alone = {(name, index): _alone(scorer, by_name[name].segments[index][1]) for name, index in packed}
    for place, expected in alone.items():
        torch.testing.assert_close(packed[place], expected, rtol=1e-5, atol=1e-5)
    weights = [weight for weight in scorer.parameters() if weight.requires_grad]
    ours, theirs = (_gradient(of, weights) for of in (packed, alone))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * max(1.0, float(other.abs().max())))


def _scorer(folder: Path) -> model.Scorer:
    return model.load(make_config(folder).model, 0.7, 5).train()


def _alone(scorer: model.Scorer, one: Segment) -> torch.Tensor:
    """Return the logprobs of a segment's sampled tokens, computed without anything else in the row."""
    ids, sampled = torch.tensor(_whole(one)), torch.tensor(_sampled(one), dtype=torch.int64)
    targets = sampled + len(ids) - len(one.completion.tokens)
    return scorer(RowTokens(ids, torch.arange(len(ids)), Packing.of([len(ids)]), targets - 1, ids[targets]))[0]


def _gradient(logprobs: dict[tuple[str, int], torch.Tensor], weights: list[torch.nn.Parameter]) -> tuple[torch.Tensor, ...]:
    """Return the gradient of a sum in which every token has its own factor."""
    total = torch.zeros(())
    for number, place in enumerate(sorted(logprobs)):
        total = total + (logprobs[place] * torch.linspace(-1, 1 + number, len(logprobs[place]))).sum()
    return torch.autograd.grad(total, weights, allow_unused=False)


@given(groups, st.sampled_from(["sequence", "group", "token"]), st.integers(1, 3), st.integers(1, 2))
@settings(max_examples=40, deadline=None)
def test_a_rollout_counts_as_one_response_for_any_layout(
    drawn: list[list[list[Drawn]]], kind: str, ranks: int, mini_batches: int
) -> None:
    """Every token gets a loss that names its rollout; the sum must be that of the literal mean of means, for each mini-batch."""
    made = _made(drawn)
    layout = Layout(ranks, ROW_TOKENS, mini_batches, kind)  # type: ignore[arg-type]
    plan, of_ranks = plan_step(0, [one.plan_group() for one in made], layout)
    rows, by_name = [_build(rank, made) for rank in of_ranks], {one.name: one for one in made}
    start = 0
    for size, planned in zip(plan.mini_batch_rows, plan.denominators, strict=True):
        mine = [of_rank[start : start + size] for of_rank in rows]
        counts = denominators.join(denominators.count_tokens(of_rank) for of_rank in mine)
        total = 0.0
        for of_rank in mine:
            for row, shares in zip(of_rank, denominators.shares(of_rank, counts, kind), strict=True):
                total += float((shares * row.advantages).sum()) / denominators.divisor(planned, counts, kind)
        members = [by_name[name] for name in sorted({name for of_rank in mine for row in of_rank for name, _ in row.samples})]
        assert total == pytest.approx(_literal(members, kind), rel=1e-5)
        start += size


def _literal(members: list[Made], kind: str) -> float:
    tokens = [
        [[rollout + 0.5] * sum(len(_sampled(each)) for each in segments) for rollout, segments in enumerate(one.rollouts)]
        for one in members
    ]
    of_groups = [[value for rollout in group for value in rollout] for group in tokens]
    lists = {
        "sequence": [rollout for group in tokens for rollout in group],
        "group": of_groups,
        "token": [list(itertools.chain(*of_groups))],
    }
    means = [math.fsum(values) / len(values) for values in lists[kind] if values]
    return math.fsum(means) / max(1, len(means))


@given(groups)
@settings(max_examples=20, deadline=None)
def test_denominators_without_damaged_groups_match_planning(drawn: list[list[list[Drawn]]]) -> None:
    made = _made(drawn)
    config = make_config(Path("m"), loss={"policy": "gspo"})
    plan, ranks = plan_step(0, [one.plan_group() for one in made], Layout(1, ROW_TOKENS, 1, "sequence"))
    assert without(plan, ranks, set(), config)[0].denominators == plan.denominators


def test_priorities_count_a_rollout_once_for_any_packing() -> None:
    made = make(0, [[(0, [(5, False), (6, False)]), (3, [(7, False)])], [(0, [(8, False)])]])
    _, (rank,) = plan_step(0, [made.plan_group()], Layout(1, 100))
    samples = [sample for row in rank.rows for sample in row]
    together, apart = (_build(RankPlan(rows), [made]) for rows in ([samples], [[sample] for sample in samples]))
    found = [priorities.join([priorities.of_rows(rows, [row.targets != 6 for row in rows])]) for rows in (together, apart)]
    assert found == [{"0-0": pytest.approx(0.5 * 2 / 3 + 1.5)}] * 2


def _group() -> Made:
    """Return two rollouts: one of two segments, the second after a context of five tokens, and one directly after the prompt."""
    return make(0, [[(0, [(5, False)]), (3, [(6, False), (7, True)])], [(0, [(8, False)])]])


def test_a_row_of_two_contexts_matches_a_hand_computed_one() -> None:
    made = _group()
    _, (rank,) = plan_step(0, [made.plan_group()], Layout(1, 100))
    (row,) = _build(rank, [made])
    assert row.samples == ((made.name, 0), (made.name, 1), (made.name, 0))
    assert row.input_ids.tolist() == [3, 1, 4, 5, 8, 3, 1, 4, 1, 5, 6, 7]
    assert row.positions.tolist() == [0, 1, 2, 3, 3, 0, 1, 2, 3, 4, 5, 6]
    assert (row.predictors.tolist(), row.targets.tolist()) == ([2, 2, 9], [5, 8, 6])


def test_segments_that_cannot_be_trained_on_are_damaged() -> None:
    cases: list[tuple[dict[str, list[Any]], str]] = [
        ({"rollout": [[0, 0, 1]]}, "rollout is int32 of 2 dimensions"),
        ({"context": [3, 1, 4, 1, 96]}, "do not fit a vocabulary of 96"),
        ({"context": [3, 1, 4, 1, -5]}, "do not fit a vocabulary of 96"),
    ]
    made = _group()
    _, (rank,) = plan_step(0, [made.plan_group()], Layout(1, 100))
    for changes, message in cases:
        payload = msgspec.structs.replace(made.payload, **{name: np.array(value, np.int32) for name, value in changes.items()})
        with pytest.raises(Damaged, match=message):
            batches.build(rank, {made.name: payload}, vocabulary=VOCABULARY, row_tokens=100)
