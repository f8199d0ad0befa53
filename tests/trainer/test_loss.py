"""Every formula of the loss against numbers worked out by hand and against a slow float64 twin."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.protocol.config.training import Loss
from services.trainer import loss
from services.trainer.loss import Tokens


def _tokens(
    theta: list[float],
    advantages: list[float],
    old: list[float] | None = None,
    behaviour: list[float] | None = None,
    reference: list[float] | None = None,
) -> Tokens:
    def tensor(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    logprobs = tensor(theta).requires_grad_()
    return Tokens(
        logprobs=logprobs,
        old=logprobs.detach() if old is None else tensor(old),
        behaviour=tensor(behaviour if behaviour is not None else old if old is not None else theta),
        reference=None if reference is None else tensor(reference),
        advantages=tensor(advantages),
        entropy=torch.zeros(len(theta), dtype=torch.float64),
        samples=torch.zeros(len(theta), dtype=torch.int64),
    )


def _plain(**options: object) -> Loss:
    return Loss.model_validate({"kl_beta": 0.0} | options)


@pytest.mark.parametrize(
    ("policy", "ratio", "advantage", "expected", "gradient", "low", "high"),
    [
        ("grpo", 1.0, 2.0, -2.0, -2.0, 0, 0),
        ("grpo", 1.25, 1.0, -1.2, 0.0, 0, 1),  # above 1.2: clipped
        ("dapo", 1.25, 1.0, -1.25, -1.25, 0, 0),  # below 1.272: not
        ("dapo", 1.5, 2.0, -2.544, 0.0, 0, 1),
        ("dapo", 1.5, -2.0, 3.0, 3.0, 0, 0),  # a worse token that became likelier: never clipped
        ("grpo", 0.5, 1.0, -0.5, -0.5, 0, 0),
        ("grpo", 0.5, -1.0, 0.8, 0.0, 1, 0),
        ("dapo", 0.5, -1.0, 0.8, 0.0, 1, 0),
        ("dapo", 0.5, 0.0, 0.0, 0.0, 0, 0),
    ],
)
def test_policy_losses_by_hand(
    policy: str, ratio: float, advantage: float, expected: float, gradient: float, low: int, high: int
) -> None:
    tokens = _tokens([math.log(ratio) - 1], [advantage], old=[-1.0])
    output = loss.compute(tokens, _plain(policy=policy), 1.0)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(expected)
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.item() == pytest.approx(gradient)
    assert (output.sums["clip_low"].item(), output.sums["clip_high"].item()) == (low, high)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    # D = ln 2, r = exp(theta - old) = 3
    [("k0", math.log(2)), ("k1", math.log(2) ** 2 / 2), ("k2", 0.5 - 1 + math.log(2)), ("k3", 3 * math.log(2))],
)
def test_kl_by_hand(estimator: str, expected: float) -> None:
    tokens = _tokens([-1.0], [0.0], old=[-1 - math.log(3)], reference=[-1 - math.log(2)])
    assert loss.reference_kl(tokens, estimator).item() == pytest.approx(expected)


def test_kl_is_bounded_where_the_reference_is_almost_certain_the_other_way() -> None:
    tokens = _tokens([-1.0, -500.0], [0.0, 0.0], reference=[-500.0, -1.0])
    assert loss.reference_kl(tokens, "k0").tolist() == [40.0, -40.0]
    assert loss.reference_kl(tokens, "k2").isfinite().all()


@pytest.mark.parametrize(
    ("lower", "upper", "weights"),
    [(0.0, 2.0, [0.25, 0.5, 1, 2, 2]), (0.4, 2.5, [0.4, 0.5, 1, 2, 2.5]), (0.0, 100.0, [0.25, 0.5, 1, 2, 4])],
)
def test_correction_weights_by_hand(lower: float, upper: float, weights: list[float]) -> None:
    ratios = [0.25, 0.5, 1.0, 2.0, 4.0]
    tokens = _tokens([-3.0] * 5, [1.0] * 5, behaviour=[-3 - math.log(ratio) for ratio in ratios])
    output = loss.compute(tokens, _plain(correction_lower=lower, correction_upper=upper), 1.0)
    output.loss.backward()
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.tolist() == pytest.approx([-weight for weight in weights])
    assert output.sums["rho"].item() == pytest.approx(sum(ratios))
    assert output.sums["rho_clipped"].item() == sum(abs(a - b) > 1e-9 for a, b in zip(ratios, weights, strict=True))


def test_correction_is_bounded_before_exp() -> None:
    rho = loss.correction(torch.tensor([-1.0, -200.0]), torch.tensor([-200.0, -1.0]))
    assert rho.tolist() == pytest.approx([math.exp(10), math.exp(-10)])


def test_kl_is_not_weighted_by_the_correction() -> None:
    one = _tokens([-1.0], [0.0], behaviour=[-1.0], reference=[-2.0])
    other = _tokens([-1.0], [0.0], behaviour=[-9.0], reference=[-2.0])
    config = _plain(kl_beta=0.5, kl_estimator="k0")
    assert loss.compute(one, config, 1.0).loss.item() == loss.compute(other, config, 1.0).loss.item() == pytest.approx(0.5)


def test_tokens_without_a_finite_behaviour_logprob_leave_both_sums() -> None:
    wild = [float("nan"), float("-inf"), float("inf")]
    tokens = _tokens([-1.0, -2.0, -1.0, -3.0], [1.0, 5.0, 5.0, 5.0], behaviour=[-1.0, *wild], reference=[-2.0] * 4)
    config = _plain(kl_beta=1.0, kl_estimator="k0")
    planned = 4.0
    excluded = float((~loss.counted(tokens.behaviour)).sum())
    output = loss.compute(tokens, config, loss.corrected_denominator(planned, excluded, "token"))
    output.loss.backward()
    assert excluded == 3
    assert output.loss.item() == pytest.approx(-1.0 + 1.0)  # one token over a denominator of one
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.tolist() == pytest.approx([0.0, 0, 0, 0])
    assert output.sums["tokens"].item() == 1
    assert all(value.isfinite() for value in {**output.sums, **output.maxima}.values())


def test_denominators() -> None:
    assert loss.corrected_denominator(100.0, 7.0, "token") == 93.0
    assert loss.corrected_denominator(100.0, 7.0, "constant") == 100.0
    assert loss.corrected_denominator(7.0, 7.0, "token") == 1.0


def test_no_token_at_all_is_a_loss_of_zero_with_a_gradient() -> None:
    tokens = _tokens([], [], reference=[])
    output = loss.compute(tokens, Loss(), 1.0)
    output.loss.backward()
    assert output.loss.item() == 0
    assert tokens.logprobs.grad is not None


def test_reported_gap_and_advantages() -> None:
    output = loss.compute(_tokens([-1.0, -2.0], [3.0, -4.0], behaviour=[-1.5, -1.75]), _plain(), 1.0)
    assert output.sums["logprob_gap"].item() == pytest.approx(0.75)
    assert output.maxima["logprob_gap"].item() == pytest.approx(0.5)
    assert (output.maxima["advantage"].item(), output.maxima["negative_advantage"].item()) == (3.0, 4.0)


def _twin(row: tuple[float, ...], config: Loss) -> float:
    """The written formula for one token, in plain Python."""
    theta, old, behaviour, reference, advantage = row
    if not math.isfinite(behaviour):
        return 0.0
    r = math.exp(theta - old)
    high = config.clip_low if config.policy == "grpo" else config.clip_high
    policy = max(-advantage * r, -advantage * min(max(r, 1 - config.clip_low), 1 + high))
    rho = math.exp(min(max(old - behaviour, -10), 10))
    difference = min(max(theta - reference, -40), 40)
    kl = {"k0": difference, "k1": difference**2 / 2, "k2": math.exp(-difference) - 1 + difference, "k3": r * difference}
    return min(max(rho, config.correction_lower), config.correction_upper) * policy + config.kl_beta * kl[config.kl_estimator]


logprob = st.floats(-8, -0.01)
row = st.tuples(logprob, logprob, logprob | st.just(float("nan")), logprob, st.floats(-3, 3))
configs = st.builds(
    Loss,
    policy=st.sampled_from(["grpo", "dapo"]),
    kl_estimator=st.sampled_from(["k0", "k1", "k2", "k3"]),
    kl_beta=st.sampled_from([0.05, 1.0]),
    correction_lower=st.sampled_from([0.0, 0.5]),
)


@given(st.lists(row, max_size=6), configs, st.floats(1, 50))
def test_value_and_gradient_equal_the_twin(rows: list[tuple[float, ...]], config: Loss, denominator: float) -> None:
    columns = [list(column) for column in zip(*rows, strict=True)] or [[]] * 5
    theta, old, behaviour, reference, advantages = columns
    tokens = _tokens(theta, advantages, old, behaviour, reference)
    output = loss.compute(tokens, config, denominator)
    output.loss.backward()
    expected = sum(_twin(one, config) for one in rows) / denominator
    assert output.loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert tokens.logprobs.grad is not None
    for one, gradient in zip(rows, tokens.logprobs.grad.tolist(), strict=True):
        step = 1e-6
        left, right = (_twin((one[0] + sign * step, *one[1:]), config) / denominator for sign in (-1, 1))
        middle = 2 * _twin(one, config) / denominator - left
        if right == pytest.approx(middle, rel=1e-6, abs=1e-9):  # smooth here: not on the edge of a clip
            assert gradient == pytest.approx((right - left) / (2 * step), rel=1e-4, abs=1e-6)
