"""Every policy loss, correction mask and KL estimator by hand, and the configuration keys that each policy loss reads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from services.config.loss import CLIPS, POLICIES, Loss
from services.trainer import losses
from services.trainer.losses import log_ratio
from services.trainer.losses.policies import POLICY_LOSSES, binary_divergence
from tests.trainer.losses.tokens import make_tokens, plain

LN2 = math.log(2)


@pytest.mark.parametrize(
    ("policy", "ratio", "advantage", "expected", "gradient", "low", "high"),
    [
        ("grpo", 1.0, 2.0, -2.0, -2.0, 0, 0),
        ("grpo", 1.25, 1.0, -1.2, 0.0, 0, 1),  # above 1.2: clipped
        ("dapo", 1.25, 1.0, -1.25, -1.25, 0, 0),  # below 1.272: not
        ("dapo", 1.5, 2.0, -2.544, 0.0, 0, 1),
        ("dapo", 1.5, -2.0, 3.0, 3.0, 0, 0),  # a bad token that became likelier: never clipped
        ("grpo", 0.5, 1.0, -0.5, -0.5, 0, 0),
        ("grpo", 0.5, -1.0, 0.8, 0.0, 1, 0),
        ("grpo", 1.0, -2.0, 2.0, 2.0, 0, 0),
        ("dr_grpo", 1.25, 1.0, -1.2, 0.0, 0, 1),
        ("dapo", 0.5, -1.0, 0.8, 0.0, 1, 0),
        ("dapo", 0.5, 0.0, 0.0, 0.0, 0, 0),
        ("dapo", 1.5, 0.0, 0.0, 0.0, 0, 0),
        # theta = ln ratio - 1: -A sg(weight) theta, whose gradient is never cut
        ("cispo", 1.5, 0.5, -0.5 * 1.272 * (math.log(1.5) - 1), -0.5 * 1.272, 0, 1),
        ("cispo", 1.5, 0.0, 0.0, 0.0, 0, 0),
        ("cispo", 1.5, -2.0, 2 * 1.272 * (math.log(1.5) - 1), 2 * 1.272, 0, 0),
        ("cispo", 0.5, -1.0, 0.5 * (-LN2 - 1), 0.5, 0, 0),  # no lower bound
        ("reinforce", 1.1, 1.0, -1.1 * (math.log(1.1) - 1), -1.1, 0, 0),
        ("reinforce", 1.5, 1.0, -1.272 * (math.log(1.5) - 1), -1.272, 0, 1),
        ("reinforce", 0.5, -1.0, 0.8 * (-LN2 - 1), 0.8, 1, 0),
        # p = 1/e, q = ratio / e: |p - q| = 0.368 |ratio - 1|
        ("dppo_tv", 1.25, 1.0, -1.25, -1.25, 0, 0),  # 0.092
        ("dppo_tv", 1.3, 1.0, 0.0, 0.0, 0, 1),  # 0.110
        ("dppo_tv", 1.3, -1.0, 1.3, 1.3, 0, 0),  # the update moves the ratio back towards 1
        ("dppo_tv", 0.7, -1.0, 0.0, 0.0, 1, 0),
        ("dppo_tv", 0.7, 1.0, -0.7, -0.7, 0, 0),
    ],
)
def test_policy_losses_of_one_token(
    policy: str, ratio: float, advantage: float, expected: float, gradient: float, low: int, high: int
) -> None:
    tokens = make_tokens([math.log(ratio) - 1], [advantage], old=[-1.0])
    output = losses.compute(tokens, plain(policy=policy), 1.0)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(expected)
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.item() == pytest.approx(gradient)
    assert (output.sums["clip_low"].item(), output.sums["clip_high"].item()) == (low, high)


WIDE: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.272}
"""Token-level bounds; gspo's defaults, for whole responses, are a thousandth of these."""


def test_gspo_clips_responses_and_all_their_tokens_get_gradient() -> None:
    # Ratios of the responses: sqrt(1.5 x 0.96) = 1.2, sqrt(2 x 1.28) = 1.6, and 0.5 alone. Interleaved in the row.
    ratios, samples = [1.5, 2.0, 0.5, 0.96, 1.28], [0, 2, 1, 0, 2]
    advantages = [{0: 1.0, 1: -3.0, 2: 2.0}[sample] for sample in samples]
    tokens = make_tokens([math.log(r) - 1 for r in ratios], advantages, old=[-1.0] * 5, samples=samples)
    output = losses.compute(tokens, plain(policy="gspo", **WIDE), 1.0)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-2 * 1.2 + 3 * 0.8 - 2 * 2 * 1.272)
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.tolist() == pytest.approx([-1.2, 0, 0, -1.2, 0])
    assert (output.sums["clip_low"].item(), output.sums["clip_high"].item()) == (1, 2)
    assert output.sums["ratio"].item() == pytest.approx(sum(ratios)), "the reported ratio is per token"


def test_gspo_ignores_tokens_without_a_finite_behaviour_logprob() -> None:
    tokens = make_tokens([-0.9, -5.0, -0.9], [1.0] * 3, old=[-1.0] * 3, behaviour=[-1.0, float("nan"), -1.0])
    output = losses.compute(tokens, plain(policy="gspo", **WIDE), 1.0)
    assert output.loss.item() == pytest.approx(-2 * math.exp(0.1))


def test_gspo_equals_dapo_if_ratios_within_a_response_are_equal() -> None:
    tokens = make_tokens([-0.9, -1.9, -0.5], [1.0, 1.0, -2.0], old=[-1.0, -2.0, -1.0], samples=[3, 3, 1])
    one, other = (losses.compute(tokens, plain(policy=policy, **WIDE), 1.0).loss for policy in ("gspo", "dapo"))
    assert one.item() == pytest.approx(other.item())
    torch.testing.assert_close(*(torch.autograd.grad(loss, tokens.logprobs)[0] for loss in (one, other)))


def test_binary_divergences_match_hand_computed_values() -> None:
    p, q = torch.tensor([0.5, 0.25]).double().log(), torch.tensor([0.75, 0.25]).double().log()
    assert binary_divergence(p, q, "tv").tolist() == pytest.approx([0.25, 0])
    assert binary_divergence(p, q, "kl").tolist() == pytest.approx([0.5 * math.log(0.5 / 0.75) + 0.5 * LN2, 0])


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_binary_divergences_of_certain_tokens_are_finite(kind: str) -> None:
    certain, almost, hardly = 0.0, -1e-7, -80.0
    behaviour, logprobs = torch.tensor([[a, b] for a in (certain, almost, hardly) for b in (certain, almost, hardly)]).T
    found = binary_divergence(behaviour, logprobs, kind)
    assert not found.isnan().any()
    assert (found >= -1e-6).all()
    assert found[0] == 0


def test_dppo_kl_masks_by_its_own_divergence() -> None:
    # At p = 0.5 and q = 0.65 the tv is 0.15 and the kl 0.047.
    tokens = make_tokens([math.log(0.65)], [1.0], old=[math.log(0.5)])
    assert losses.compute(tokens, plain(policy="dppo_tv"), 1.0).loss.item() == 0
    for bound, expected in ((0.04, 0.0), (0.05, -1.3)):
        config = plain(policy="dppo_kl", clip_high=bound)
        assert losses.compute(tokens, config, 1.0).loss.item() == pytest.approx(expected)


def test_ratios_that_overflow_exp_are_bounded() -> None:
    for policy in POLICIES:
        tokens = make_tokens([-0.1, -900.0], [-1.0, -1.0], old=[-900.0, -0.1], samples=[0, 1], dtype=torch.float32)
        output = losses.compute(tokens, plain(policy=policy), 1.0)
        output.loss.backward()
        assert tokens.logprobs.grad is not None
        assert tokens.logprobs.grad.isfinite().all(), policy
        assert all(value.isfinite().all() for value in output.sums.values()), policy


@pytest.mark.parametrize("policy", POLICIES)
def test_extreme_behaviour_logprobs_keep_gradients_finite(policy: str) -> None:
    for options in ({}, {"kl_beta": 0.1}):
        for behaviour in (-1000.0, -60.0, -39.0, -21.0, 0.1):
            tokens = make_tokens([-0.5, -0.5], [8.0, -8.0], behaviour=[behaviour] * 2, reference=[-2.0] * 2, dtype=torch.float32)
            losses.compute(tokens, plain(policy=policy, **options), 1.0, from_behaviour=True).loss.backward()
            assert tokens.logprobs.grad is not None
            assert tokens.logprobs.grad.abs().max() < 1e11, (options, behaviour)


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_losses_read_the_documented_keys(policy: str) -> None:
    read: set[str] = set()

    class Recorder:
        def __getattr__(self, key: str) -> Any:
            read.add(key)
            return getattr(Loss(), key)

    POLICY_LOSSES[policy](make_tokens([-1.0], [1.0]), Recorder())  # pyright: ignore[reportArgumentType]
    assert read == set(POLICIES[policy]) <= set(CLIPS)
    assert POLICY_LOSSES.keys() == POLICIES.keys()


RATIOS = [0.25, 0.5, 1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, [0.25, 0.5, 1, 2, 2]),
        ({"correction_upper": 100.0}, [0.25, 0.5, 1, 2, 4]),
        ({"correction_mask": {"token": [0.5, 2.0]}}, [0, 0.5, 1, 2, 0]),
        ({"correction_mask": {"token": [0.5, 4.0]}, "correction_upper": 3.0}, [0, 0.5, 1, 2, 3]),
        ({"correction_mask": {"sequence": [0.9, 1.1]}}, [0.25, 0.5, 1, 2, 2]),  # the geometric mean of all five is 1
        # mean |rho - 1| / 2 = (0.75 + 0.5 + 0 + 1 + 3) / 10 = 0.525, and A > 0
        ({"correction_mask": {"variation": [0.53]}}, [0.25, 0.5, 1, 2, 2]),
        ({"correction_mask": {"variation": [0.52]}}, [0.25, 0.5, 1, 0, 0]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_correction_weights_of_one_response(options: dict[str, Any], weights: list[float], dtype: torch.dtype) -> None:
    tokens = make_tokens([-3.0] * 5, [1.0] * 5, behaviour=[-3 - math.log(ratio) for ratio in RATIOS], dtype=dtype)
    output = losses.compute(tokens, plain(**options), 1.0)
    output.loss.backward()
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.tolist() == pytest.approx([-weight for weight in weights], rel=1e-6)
    for weight, gradient in zip(weights, tokens.logprobs.grad.tolist(), strict=True):
        assert weight != 0 or gradient == 0, "exactly"
    assert output.sums["rho"].item() == pytest.approx(sum(RATIOS))
    assert output.sums["rho_weight"].item() == pytest.approx(sum(weights))
    assert output.sums["rho_dropped"].item() == weights.count(0)
    clipped = sum(weight != 0 and abs(weight - ratio) > 1e-6 for weight, ratio in zip(weights, RATIOS, strict=True))
    assert output.sums["rho_clipped"].item() == clipped


def test_zero_weights_cancel_only_the_policy_term() -> None:
    tokens = make_tokens([-0.3, -3.0], [7.0, 7.0], behaviour=[-5.0, -3.0], reference=[-0.8, -3.0])
    config = plain(kl_beta=1.0, correction_mask={"token": [0.5, 2.0]})
    output = losses.compute(tokens, config, 1.0)
    output.loss.backward()
    kl = math.expm1(-0.5) + 0.5  # D = 0.5 of the first token, whose policy term is masked
    assert output.loss.item() == pytest.approx(-7 + kl)
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.tolist() == pytest.approx([-math.expm1(-0.5), -7.0])
    assert output.sums["tokens"].item() == 2


def test_sequence_masks_act_on_responses_not_rows() -> None:
    # Geometric means: sqrt(4 x 1) = 2 of response 4, sqrt(0.25 x 4) = 1 of response 1.
    ratios, samples = [4.0, 0.25, 1.0, 4.0], [4, 1, 4, 1]
    tokens = make_tokens([-3.0] * 4, [1.0] * 4, behaviour=[-3 - math.log(r) for r in ratios], samples=samples)
    weights = losses.correct(tokens, plain(correction_mask={"sequence": [0.5, 1.5]}, correction_upper=5.0)).weights
    assert weights.tolist() == pytest.approx([0, 0.25, 0, 4])
    # mean |rho - 1| / 2: (3 + 0) / 4 = 0.75 and (0.75 + 3) / 4 = 0.94
    weights = losses.correct(tokens, plain(correction_mask={"variation": [0.8]}, correction_upper=5.0)).weights
    assert weights.tolist() == pytest.approx([4, 0.25, 1, 0])


def test_the_variation_mask_drops_updates_that_widen_the_gap() -> None:
    ratios, advantages = [3.0, 3.0, 0.1, 0.1, 3.0], [1.0, -1.0, 1.0, -1.0, 0.0]
    tokens = make_tokens([-3.0] * 5, advantages, behaviour=[-3 - math.log(r) for r in ratios])
    dropped = losses.correct(tokens, plain(correction_mask={"variation": [0.1]})).dropped
    assert dropped.tolist() == [True, False, False, True, False]


def test_correction_is_bounded_before_exp() -> None:
    assert log_ratio(torch.tensor([-1.0, -200.0]), torch.tensor([-200.0, -1.0])).tolist() == [10, -10]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    # D = ln 2, r = exp(theta - old) = 3
    [("k1", LN2), ("k2", LN2**2 / 2), ("k3", 0.5 - 1 + LN2), ("k1_weighted", 3 * LN2)],
)
def test_kl_estimators_match_hand_computed_values(estimator: str, expected: float) -> None:
    tokens = make_tokens([-1.0], [0.0], old=[-1 - math.log(3)], reference=[-1 - LN2])
    assert losses.reference_kl(tokens, estimator).item() == pytest.approx(expected)


def test_kl_is_bounded_if_policy_and_reference_disagree() -> None:
    tokens = make_tokens([-1.0, -500.0], [0.0, 0.0], reference=[-500.0, -1.0])
    assert losses.reference_kl(tokens, "k1").tolist() == [40.0, -40.0]
    assert losses.reference_kl(tokens, "k3").isfinite().all()
