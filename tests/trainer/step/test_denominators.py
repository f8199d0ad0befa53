"""Divisors and shares give the literal means for any layout of rows, ranks and mini-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.config.loss import Loss
from services.dataprep.planning.plan import Layout, PlanGroup, plan_step
from services.protocol.payloads import Payload
from services.trainer import losses
from services.trainer.step import batches, denominators
from services.trainer.step.batches import PackedRow
from tests.support.models.tiny_model import CONSTANT
from tests.trainer import literal

KINDS = ["token", "constant", "sequence", "group"]

token = st.tuples(st.floats(-3, -0.1), st.booleans(), st.booleans())  # logprob, sampled by a tool, counted
response = st.tuples(st.lists(token, min_size=1, max_size=5), st.floats(0.1, 2), st.booleans())
step = st.lists(st.lists(response, min_size=1, max_size=3), min_size=1, max_size=4)


def _payload(group: list[Any]) -> Payload:
    tokens = [token for response, _, _ in group for token in response]
    logprobs = np.array([logprob if counted else np.nan for logprob, _, counted in tokens], np.float32)
    spans = [(i, t, t + 1) for i, (response, _, _) in enumerate(group) for t, (_, tool, _) in enumerate(response) if tool]
    return Payload(
        np.array([1], np.int32), np.array([len(response) for response, _, _ in group], np.int32),
        np.zeros(len(tokens), np.int32), logprobs, np.zeros((0, 4), np.int32), np.array(spans, np.int32).reshape(-1, 3),
    )  # fmt: skip


def _plan_group(name: str, group: list[Any], payload: Payload) -> PlanGroup:
    tools = np.array([sum(tool for _, tool, _ in response) for response, _, _ in group])
    advantages, trained = np.array([a for _, a, _ in group]), np.array([not masked for _, _, masked in group])
    return PlanGroup(name, f"{name}.1", 1, payload.lengths, advantages, trained, tools)


@given(step, st.sampled_from(KINDS), st.integers(1, 3), st.integers(1, 2))
@settings(max_examples=150, deadline=None)
def test_every_layout_gives_the_exact_mean(groups: list[list[Any]], kind: str, ranks: int, mini_batches: int) -> None:
    config = Loss.model_validate({"policy": "reinforce", "kl_beta": 0.0, "denominator": kind})
    payloads = {f"0-{i}.1": _payload(group) for i, group in enumerate(groups)}
    planned = [_plan_group(f"0-{i}", group, payloads[f"0-{i}.1"]) for i, group in enumerate(groups)]
    plan, rank_plans = plan_step(0, planned, Layout(ranks, 12, mini_batches, config.denominator, CONSTANT))
    rows = [batches.build(one, payloads, vocabulary=2, row_tokens=12) for one in rank_plans]
    start = 0
    for size, planned_divisor in zip(plan.mini_batch_rows, plan.denominators, strict=True):
        of_ranks = [of_rank[start : start + size] for of_rank in rows]
        token_counts = denominators.join(denominators.count_tokens(mine) for mine in of_ranks)
        divisor = denominators.divisor(planned_divisor, token_counts, kind)
        total = sum(_loss(row, token_counts, config, divisor) for mine in of_ranks for row in mine)
        members = {payload for mine in of_ranks for row in mine for payload, _ in row.samples}
        responses = [one for i, group in enumerate(groups) if f"0-{i}.1" in members for one in _literal(i, group)]
        expected = literal.objective(responses, config, constant=CONSTANT * len(members)).item()
        assert total == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert denominators.excluded(token_counts) == sum(int((~one.behaviour.isfinite()).sum()) for one in responses)
        start += size


def _loss(row: PackedRow, token_counts: Any, config: Loss, divisor: float) -> float:
    (shares,) = denominators.shares([row], token_counts, config.denominator)
    theta = row.behaviour.nan_to_num(-1.0).requires_grad_()
    tokens = losses.Tokens(
        theta, theta.detach(), row.behaviour, None, row.advantages, row.weights, shares, torch.zeros(len(theta)),
        row.sample_of_token,
    )  # fmt: skip
    return losses.compute(tokens, config, divisor).loss.item()


def _literal(number: int, group: list[Any]) -> list[literal.Response]:
    responses = []
    for tokens, advantage, masked in group:
        sampled = [] if masked else [(logprob, counted) for logprob, tool, counted in tokens if not tool]
        theta = torch.tensor([logprob for logprob, _ in sampled], dtype=torch.float64)
        behaviour = torch.tensor([logprob if counted else float("nan") for logprob, counted in sampled], dtype=torch.float64)
        responses.append(literal.Response(theta, theta, behaviour, theta, theta, advantage, 1.0, number))
    return responses


def test_divisors_match_hand_computed_values() -> None:
    # Group a: 3 of 4 tokens count in completion 0, none of 1 in completion 1; group b: none of its 2; group c is masked.
    token_counts = {
        ("a.1", 0): denominators.TokenCounts(planned=4, counted=3),
        ("a.1", 1): denominators.TokenCounts(planned=1, counted=0),
        ("b.1", 0): denominators.TokenCounts(planned=2, counted=0),
        ("c.1", 0): denominators.TokenCounts(),
    }
    assert denominators.excluded(token_counts) == 4
    assert denominators.divisor(7.0, token_counts, "token") == 3
    assert denominators.divisor(100.0, token_counts, "constant") == 100
    assert denominators.divisor(3.0, token_counts, "sequence") == 1
    assert denominators.divisor(2.0, token_counts, "group") == 1
    nothing = {("b.1", 0): token_counts["b.1", 0]}
    assert [denominators.divisor(planned, nothing, kind) for planned, kind in ((2, "token"), (1, "sequence"), (1, "group"))] == [
        1, 1, 1,
    ]  # fmt: skip


def test_plans_count_the_tokens_in_the_loss() -> None:
    masked = [([(-1.0, False, True)] * 2, 1.0, True), ([(-1.0, True, True)], 1.0, False)]
    groups = [masked, [([(-1.0, False, True)] * 3, 1.0, False)] * 2, [*masked, ([(-1.0, False, True)], 1.0, False)]]
    planned = [_plan_group(f"0-{i}", group, _payload(group)) for i, group in enumerate(groups)]
    counts = {kind: plan_step(0, planned, Layout(1, 64, 1, kind))[0].denominators for kind in KINDS if kind != "constant"}
    assert counts == {"token": [7.0], "sequence": [3.0], "group": [2.0]}
    assert plan_step(0, planned[:1], Layout(1, 64, 1, "group"))[0].denominators == [1.0]
