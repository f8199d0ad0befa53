"""Policy losses: pure functions of named tensors.

Guarantees: the value is the sum over the given tokens divided by the given denominator and depends on nothing else, so
losses of rows add up, and the gradient of a step is the same however tokens are spread over rows, micro-batches and
ranks. Tokens with a non-finite behaviour logprob contribute nothing, neither here nor to `corrected_denominator`.

Symbols (docs/semantics.md): theta = current policy, old = policy at the start of the training step, mu = the policy that
generated (behaviour), ref = reference policy; r = exp(theta - old), A = advantage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from services.protocol.config.training import Loss

MAX_LOG_CORRECTION = 10.0
"""Bound of |old - mu| before exp: e^10 = 22026 is far above any sensible weight bound and far below overflow."""

MAX_LOG_REFERENCE = 40.0
"""Bound of |theta - ref| before exp: e^40 = 2.4e17, whose sums stay finite in float32."""


@dataclass(frozen=True)
class Tokens:
    """Response tokens of one row that are in the loss; R = their number, all tensors are [R], logprobs float32."""

    logprobs: Tensor  # theta, carries the gradient
    old: Tensor  # no gradient
    behaviour: Tensor  # mu; NaN or infinite: the token is excluded
    reference: Tensor | None  # ref; None only with kl_beta = 0
    advantages: Tensor
    entropy: Tensor
    samples: Tensor  # int64, which response of the row a token belongs to, for losses that act per sequence


@dataclass(frozen=True)
class PolicyTerm:
    """What a policy loss returns, [R] each."""

    loss: Tensor
    clipped_low: Tensor  # bool: the ratio is below its bound and the gradient is cut
    clipped_high: Tensor  # bool: the ratio is above its bound and the gradient is cut


@dataclass(frozen=True)
class LossOutput:
    """Loss of a row and what to report of it. `sums` and `maxima` are over its counted tokens; "tokens" counts them."""

    loss: Tensor  # scalar
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


PolicyLoss = Callable[[Tokens, Loss], PolicyTerm]

POLICY_LOSSES: dict[str, PolicyLoss] = {}
"""Policy losses by the name that `loss.policy` gives."""


def policy_loss(name: str) -> Callable[[PolicyLoss], PolicyLoss]:
    """Register a policy loss under `name`."""

    def register(function: PolicyLoss) -> PolicyLoss:
        POLICY_LOSSES[name] = function
        return function

    return register


@policy_loss("grpo")
def grpo(tokens: Tokens, config: Loss) -> PolicyTerm:
    """max(-A r, -A clip(r, 1 - e, 1 + e)), the surrogate of PPO (Schulman et al. 2017, eq. 7)."""
    return _clipped(tokens, config.clip_low, config.clip_low)


@policy_loss("dapo")
def dapo(tokens: Tokens, config: Loss) -> PolicyTerm:
    """As grpo with an upper bound of its own, "clip-higher" (Yu et al. 2025, eq. 10)."""
    return _clipped(tokens, config.clip_low, config.clip_high)


def _clipped(tokens: Tokens, low: float, high: float) -> PolicyTerm:
    advantages = tokens.advantages
    ratio = (tokens.logprobs - tokens.old).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    return PolicyTerm(loss, (advantages < 0) & (ratio < 1 - low), (advantages > 0) & (ratio > 1 + high))


def reference_kl(tokens: Tokens, estimator: str) -> Tensor:
    """KL estimate per token, [R]: D = clamp(theta - ref, +-40); k0 D, k1 D^2/2, k2 expm1(-D) + D, k3 r D."""
    if tokens.reference is None:
        raise ValueError("loss.kl_beta > 0 needs reference logprobs")
    difference = (tokens.logprobs - tokens.reference).clamp(-MAX_LOG_REFERENCE, MAX_LOG_REFERENCE)
    match estimator:
        case "k0":
            return difference
        case "k1":
            return difference.square() / 2
        case "k2":
            return torch.expm1(-difference) + difference
        case "k3":
            return (tokens.logprobs - tokens.old).exp() * difference
    raise ValueError(f"loss.kl_estimator = {estimator!r} is not one of k0, k1, k2, k3")


def correction(old: Tensor, behaviour: Tensor) -> Tensor:
    """rho = exp(clamp(old - mu, +-10)), [R], the train/infer importance weight before its bounds."""
    return (old - behaviour).clamp(-MAX_LOG_CORRECTION, MAX_LOG_CORRECTION).exp()


def counted(behaviour: Tensor) -> Tensor:
    """Which tokens take part, bool like `behaviour`: those whose behaviour logprob is finite."""
    return behaviour.isfinite()


def corrected_denominator(planned: float, excluded: float, kind: str) -> float:
    """The divisor of a mini-batch.

    `planned` is the plan's, `excluded` the number of tokens that `counted` refuses in the mini-batch over *all* ranks. A
    token count loses the excluded ones; a constant is what it is. With nothing left to divide, 1.
    """
    return max(planned - excluded, 1.0) if kind == "token" else planned


def compute(tokens: Tokens, config: Loss, denominator: float) -> LossOutput:
    """(sum over counted tokens of weight * policy loss + kl_beta * KL) / denominator.

    weight = clamp(rho, correction_lower, correction_upper), truncated importance sampling (Yao et al. 2025); the KL is not
    weighted. With no token the loss is 0 and still has a gradient (of zeros), so that an empty row takes part in backward.
    """
    keep = counted(tokens.behaviour)
    tokens = Tokens(
        logprobs=tokens.logprobs[keep],
        old=tokens.old[keep],
        behaviour=tokens.behaviour[keep],
        reference=None if tokens.reference is None else tokens.reference[keep],
        advantages=tokens.advantages[keep],
        entropy=tokens.entropy[keep],
        samples=tokens.samples[keep],
    )
    term = POLICY_LOSSES[config.policy](tokens, config)
    rho = correction(tokens.old, tokens.behaviour)
    weight = rho.clamp(config.correction_lower, config.correction_upper)
    loss = weight * term.loss
    if config.kl_beta > 0:
        kl = reference_kl(tokens, config.kl_estimator)
        loss = loss + config.kl_beta * kl
    else:
        kl = torch.zeros_like(loss)
    sums, maxima = _measure(tokens, term, rho, weight, kl.detach())
    return LossOutput(loss.sum() / denominator, {**sums, "loss": loss.detach().sum() / denominator}, maxima)


@torch.no_grad()
def _measure(
    tokens: Tokens, term: PolicyTerm, rho: Tensor, weight: Tensor, kl: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    ratio = (tokens.logprobs - tokens.old).exp()
    gap = (tokens.behaviour - tokens.old).abs()
    per_token = {
        "tokens": torch.ones_like(ratio),
        "policy_loss": term.loss,
        "kl": kl,
        "clip_low": term.clipped_low,
        "clip_high": term.clipped_high,
        "ratio": ratio,
        "ratio_squared": ratio.square(),
        "entropy": tokens.entropy,
        "rho": rho,
        "rho_clipped": weight != rho,
        "logprob_gap": gap,
        "advantage": tokens.advantages,
    }
    sums = {name: values.double().sum() for name, values in per_token.items()}
    lowest = torch.full((1,), -torch.inf, device=gap.device)
    maxima = {
        name: torch.cat((lowest, values)).max().double()
        for name, values in {"logprob_gap": gap, "advantage": tokens.advantages, "negative_advantage": -tokens.advantages}.items()
    }
    return sums, maxima
