"""The loss of a row, by hand and against the literal formulas (tests/trainer/literal.py)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from services.config.loss import DPPO, POLICIES, Loss
from services.trainer import losses
from services.trainer.losses import COUNTS, MAXIMA, SUMS, Tokens
from tests.trainer import literal
from tests.trainer.losses.tokens import make_tokens as _tokens
from tests.trainer.losses.tokens import plain as _plain


def test_kl_is_not_weighted_by_the_correction() -> None:
    one = _tokens([-1.0], [0.0], behaviour=[-1.0], reference=[-2.0])
    other = _tokens([-1.0], [0.0], behaviour=[-9.0], reference=[-2.0])
    config, kl = _plain(kl_beta=0.5), 0.5 * math.exp(-1)  # D = 1
    assert losses.compute(one, config, 1.0).loss.item() == losses.compute(other, config, 1.0).loss.item() == pytest.approx(kl)


def test_an_importance_weight_multiplies_the_policy_term_and_the_kl() -> None:
    # rho = 2, A = 3, D = 1: -2 * 3 + 0.5 * exp(-1), times a quarter
    tokens = _tokens([-1.0], [3.0], behaviour=[-1 - math.log(2)], reference=[-2.0], weights=[0.25])
    output = losses.compute(tokens, _plain(kl_beta=0.5), 10.0)
    output.loss.backward()
    assert output.loss.item() == output.sums["loss"].item() == pytest.approx(0.25 * (-6 + 0.5 * math.exp(-1)) / 10)
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.item() == pytest.approx(0.25 * (-6 - 0.5 * math.expm1(-1)) / 10)
    assert (output.sums["policy_loss"].item(), output.sums["kl"].item()) == pytest.approx(
        (-3, math.exp(-1))
    )  # reported unweighted


def test_weights_of_one_are_bitwise_neutral() -> None:
    generator = torch.Generator().manual_seed(0)
    theta, old, behaviour, reference, advantages = (-3 * torch.rand(5, 1000, generator=generator)).tolist()
    config, denominator = _plain(kl_beta=0.1), 997.0
    tokens = _tokens(theta, advantages, old, behaviour, reference, dtype=torch.float32)
    ours = losses.compute(tokens, config, denominator)
    (gradient,) = torch.autograd.grad(ours.loss, tokens.logprobs)
    term = losses.find(config.policy)(tokens, config)
    weight = (tokens.old - tokens.behaviour).clamp(-10, 10).exp().clamp(max=config.correction_upper)
    unweighted = (weight * term.loss + config.kl_beta * losses.reference_kl(tokens)).sum() / denominator
    assert ours.loss.dtype == torch.float32
    assert torch.equal(ours.loss, unweighted)
    assert torch.equal(gradient, torch.autograd.grad(unweighted, tokens.logprobs)[0])


def test_tokens_past_the_clip_bound_count_as_learnt() -> None:
    ratios = [1.0, 0.5, 0.5, 1.5, 1.5, 1.0, 1.25]
    advantages = [1.0, -1.0, 1.0, 1.0, -1.0, 1.0, 1.0]
    behaviour = [-1.0] * 5 + [float("nan"), -1.0]
    theta = [math.log(ratio) - 1 for ratio in ratios]
    tokens = _tokens(theta, advantages, old=theta, behaviour=behaviour)
    assert losses.compute(tokens, _plain(), 1.0).learning.tolist() == [True, False, True, False, True, False, True]
    narrow = _plain().model_copy(update={"policy": "grpo"})
    assert losses.compute(tokens, narrow, 1.0).learning.tolist()[-1] is False, "grpo's bounds are symmetric"


def test_tokens_without_a_finite_behaviour_logprob_leave_both_sums() -> None:
    wild = [float("nan"), float("-inf"), float("inf")]
    tokens = _tokens([-1.0, -2.0, -1.0, -3.0], [1.0, 5.0, 5.0, 5.0], behaviour=[-1.0, *wild], reference=[-2.0] * 4)
    config = _plain(kl_beta=1.0)
    assert losses.counted(tokens.behaviour).tolist() == [True, False, False, False]
    output = losses.compute(tokens, config, 1.0)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-1.0 + math.exp(-1))  # one token over a denominator of one
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.tolist() == pytest.approx([-1.0 - math.expm1(-1), 0, 0, 0])
    assert output.sums["tokens"].item() == 1
    assert all(value.isfinite().all() for value in {**output.sums, **output.maxima}.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_zero_tokens_give_a_zero_loss_with_a_gradient(policy: str) -> None:
    tokens = _tokens([], [], reference=[])
    output = losses.compute(tokens, Loss(policy=policy, correction_mask={"sequence": [0.5, 2.0]}), 1.0)
    output.loss.backward()
    assert output.loss.item() == 0
    assert tokens.logprobs.grad is not None


def test_reported_gap_and_advantages() -> None:
    output = losses.compute(_tokens([-1.0, -2.0], [3.0, -4.0], behaviour=[-1.5, -1.75]), _plain(), 1.0)
    assert output.sums["logprob_gap"].item() == pytest.approx(0.75)
    assert output.maxima["logprob_gap"].item() == pytest.approx(0.5)
    assert (output.maxima["advantage"].item(), output.maxima["negative_advantage"].item()) == (3.0, 4.0)


def test_every_metric_is_present_and_carries_no_gradient() -> None:
    output = losses.compute(_tokens([-1.0, -2.0], [3.0, -4.0], behaviour=[-1.5, -1.75], reference=[-3.0, -1.0]), Loss(), 1.0)
    assert set(output.sums) == {*SUMS, COUNTS}
    assert set(output.maxima) == set(MAXIMA)
    assert not any(value.requires_grad or value.dtype != torch.float64 for value in {**output.sums, **output.maxima}.values())
    assert [output.sums[name].item() for name in ("k1", "k2", "k3", "k1_weighted")] == pytest.approx(
        [2 - 1, 2**2 / 2 + 1 / 2, math.expm1(-2) + 2 + math.expm1(1) - 1, 2 - 1]
    )
    assert output.sums["kl"] == output.sums["k3"]


def test_ratios_from_behaviour_need_no_correction() -> None:
    theta, mu = [-1.0, -1.0], [-1.1, -1 - math.log(3)]
    tokens = _tokens(theta, [1.0, 1.0], old=[-5.0, -5.0], behaviour=mu)
    output = losses.compute(tokens, _plain(), 1.0, from_behaviour=True)
    assert output.loss.item() == pytest.approx(-math.exp(0.1) - 1.272)
    assert (output.sums["rho"].item(), output.sums["rho_weight"].item(), output.sums["clip_high"].item()) == (2, 2, 1)
    assert output.sums["ratio"].item() == pytest.approx(math.exp(0.1) + 3)
    assert output.maxima["logprob_gap"].item() == pytest.approx(math.log(3)), "the gap is still relative to theta"


def test_the_entropy_bonus_matches_hand_computed_values() -> None:
    tokens = replace(_tokens([-1.0, -2.0], [0.0, 0.0], behaviour=[-9.0, -2.0], weights=[0.5, 1.0]))
    entropy = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    output = losses.compute(replace(tokens, entropy=entropy), _plain(entropy_coefficient=0.1), 10.0)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-0.1 * (0.5 * 2 + 3) / 10), "weighted, not corrected"
    assert entropy.grad is not None
    assert entropy.grad.tolist() == pytest.approx([-0.005, -0.01])


def test_without_a_bonus_entropy_has_no_gradient() -> None:
    entropy = torch.tensor([2.0], requires_grad=True)
    losses.compute(replace(_tokens([-1.0], [1.0]), entropy=entropy), _plain(), 1.0).loss.backward()
    assert entropy.grad is None


def test_only_some_losses_leave_a_token_of_advantage_0_without_a_gradient() -> None:
    none, ones = torch.zeros(3), torch.ones(3)
    plain = _plain()
    assert not losses.has_gradient(none, ones, plain)
    assert not losses.has_gradient(ones, none, plain)
    assert not losses.has_gradient(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0]), plain)
    assert losses.has_gradient(torch.tensor([0.0, -0.1]), torch.ones(2), plain)
    assert not losses.has_gradient(torch.zeros(0), torch.zeros(0), plain)
    for other in (Loss(kl_beta=0.1), _plain(entropy_coefficient=0.1), _plain(policy="mine:loss")):
        assert losses.has_gradient(none, ones, other)


logprob = st.floats(-8, -0.01)
one_token = st.tuples(logprob, logprob, logprob | st.just(float("nan")), logprob, st.floats(0, 3))
one_response = st.tuples(st.lists(one_token, max_size=5), st.floats(-3, 3), st.floats(0, 1))
bounds = st.sampled_from([[0.5, 2.0], [0.9, 1.3]])
masks = st.fixed_dictionaries({}, optional={"token": bounds, "sequence": bounds, "variation": st.sampled_from([[0.1], [1.0]])})
options = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(list(POLICIES)),
        "kl_beta": st.sampled_from([0.0, 0.05, 1.0]),
        "entropy_coefficient": st.sampled_from([0.0, 0.1]),
        "correction_mask": masks,
    }
)


@given(st.lists(one_response, max_size=4), options, st.booleans())
@settings(max_examples=400, deadline=None)
def test_value_and_gradient_match_the_literal_formula(row: list[Any], chosen: dict[str, Any], mu: bool) -> None:
    # The literal formula gives the sum over tokens; means are the subject of test_denominators.py.
    config = Loss.model_validate(chosen | {"denominator": "constant"})
    tokens = _joined(row)
    output = losses.compute(tokens, config, 7.0, from_behaviour=mu)
    mu = mu or config.policy in DPPO
    expected = literal.objective(_split(row, tokens), config, mu, constant=7.0)
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-9)
    for ours, theirs in zip(_gradients(output.loss, tokens), _gradients(expected, tokens), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_match_finite_differences_without_clipping(policy: str) -> None:
    # cispo and reinforce hold their weight constant, unlike a finite difference: at theta = old it is 1; the rest is by hand.
    generator = torch.Generator().manual_seed(3)
    theta = (-2 * torch.rand(6, generator=generator, dtype=torch.float64) - 0.1).requires_grad_()
    start = theta.detach().clone()  # gradcheck moves theta in place
    near = start + 0.02 * torch.randn(6, generator=generator, dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5, -0.5], dtype=torch.float64)
    samples, ones = torch.tensor([0, 0, 0, 1, 1, 1]), torch.ones(6, dtype=torch.float64)
    config = Loss(policy=policy, kl_beta=0.3)
    held = policy in ("cispo", "reinforce")

    def value(logprobs: torch.Tensor) -> torch.Tensor:
        old = logprobs.detach() if held else near
        behaviour = near if policy in DPPO else start
        return losses.compute(Tokens(logprobs, old, behaviour, near, advantages, ones, ones, ones, samples), config, 3.0).loss

    if not held:
        assert torch.autograd.gradcheck(value, (theta,), eps=1e-7, atol=1e-5)
        return
    (gradient,) = torch.autograd.grad(value(theta), theta)
    difference = start - near
    slope = 1 - (-difference).exp()
    torch.testing.assert_close(gradient, (-advantages + 0.3 * slope) / 3)


def _joined(row: list[Any]) -> Tokens:
    """Return the tokens of one packed row, float64; theta and entropy carry gradients."""
    columns: list[list[float]] = [[], [], [], [], []]
    owners: list[int] = []
    for number, (tokens, _, _) in enumerate(row):
        owners += [number] * len(tokens)
        for column, values in zip(columns, zip(*tokens, strict=True), strict=False):
            column.extend(values)
    theta, old, behaviour, reference, entropy = (torch.tensor(column, dtype=torch.float64) for column in columns)
    samples = torch.tensor(owners, dtype=torch.int64)
    of_response = torch.tensor([[advantage, weight] for _, advantage, weight in row], dtype=torch.float64).reshape(-1, 2)
    assume(not len(samples) or bool((of_response[:, 0].abs() > 1e-6).all()))
    return Tokens(
        theta.requires_grad_(), old, behaviour, reference, of_response[samples, 0], of_response[samples, 1],
        torch.ones(len(samples), dtype=torch.float64), entropy.requires_grad_(), samples,
    )  # fmt: skip


def _split(row: list[Any], tokens: Tokens) -> list[literal.Response]:
    responses = []
    for number, (_, advantage, weight) in enumerate(row):
        mine = tokens.samples == number
        assert tokens.reference is not None
        responses.append(
            literal.Response(
                tokens.logprobs[mine], tokens.old[mine], tokens.behaviour[mine], tokens.reference[mine], tokens.entropy[mine],
                advantage, weight,
            )
        )  # fmt: skip
    return responses


def _gradients(value: torch.Tensor, tokens: Tokens) -> list[torch.Tensor]:
    if not value.requires_grad:
        return [torch.zeros_like(tokens.logprobs), torch.zeros_like(tokens.entropy)]
    found = torch.autograd.grad(value, (tokens.logprobs, tokens.entropy), allow_unused=True, retain_graph=True)
    return [torch.zeros_like(tokens.logprobs) if one is None else one for one in found]
