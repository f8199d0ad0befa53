"""Policy losses: pure functions of named tensors, one for each name of `loss.policy`.

Symbols (docs/semantics.md): theta = current policy, old = policy at the start of the training step, mu = the policy that
generated (behaviour); r = exp(theta - old), A = advantage, e = clip distance, sg = stop gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from services.config.loss import Loss
from services.trainer.losses.tokens import PolicyTerm, Tokens, bounded, response_mean

PolicyLoss = Callable[[Tokens, Loss], PolicyTerm]

POLICY_LOSSES: dict[str, PolicyLoss] = {}
"""Policy losses by their `loss.policy` name."""


def policy_loss(function: PolicyLoss) -> PolicyLoss:
    """Register a policy loss under its own name."""
    POLICY_LOSSES[function.__name__] = function
    return function


@policy_loss
def grpo(tokens: Tokens, config: Loss) -> PolicyTerm:
    """Compute max(-A r, -A clip(r, 1 - e, 1 + e)), the surrogate of PPO (Schulman et al. 2017, eq. 7), with e = clip_low.

    Equals TRL's loss_type "grpo" with epsilon = e and denominator "sequence".
    """
    return _clipped(tokens.advantages, tokens.ratio(), config.clip_low, config.clip_low)


@policy_loss
def dapo(tokens: Tokens, config: Loss) -> PolicyTerm:
    """Compute grpo with a separate upper bound, "clip-higher" (Yu et al. 2025, eq. 10).

    Equals TRL's "dapo" with denominator "token"; TRL's epsilon_high equals epsilon unless it is set.
    """
    return _clipped(tokens.advantages, tokens.ratio(), config.clip_low, config.clip_high)


@policy_loss
def dr_grpo(tokens: Tokens, config: Loss) -> PolicyTerm:
    """Compute grpo; Dr. GRPO omits its two normalisations, by the std and by the length (Liu et al. 2025).

    The difference is in the configuration, which requires centered advantages and a constant denominator. TRL's "dr_grpo" divides
    by the completions of a micro-batch x max_completion_length.
    """
    return grpo(tokens, config)


@policy_loss
def cispo(tokens: Tokens, config: Loss) -> PolicyTerm:
    """Compute -A sg(min(r, 1 + e_high)) theta: the weight is clipped, never the gradient (MiniMax 2025, eq. 4 and 5).

    Equals TRL's "cispo" with denominator "token" and epsilon_high = 1 + e_high, since TRL's is the bound of r itself.
    """
    ratio, bound = tokens.ratio().detach(), 1 + config.clip_high
    high = (tokens.advantages > 0) & (ratio > bound)
    return PolicyTerm(-tokens.advantages * ratio.clamp(max=bound) * tokens.logprobs, torch.zeros_like(high), high)


@policy_loss
def gspo(tokens: Tokens, config: Loss) -> PolicyTerm:
    """Compute dapo with the ratio of the response, s = exp(mean over its tokens of theta - old), at each of its tokens (Zheng et
    al. 2025, eq. 5 to 7).

    The gradient flows through the mean to all of them. s moves far less than r: the paper clips at 3e-4 and 4e-4. Its mean over
    responses needs denominator "sequence". Equals TRL's "grpo" with importance_sampling_level = "sequence".
    """
    ratio = bounded(response_mean(tokens.logprobs - tokens.old, tokens)).exp()
    return _clipped(tokens.advantages, ratio, config.clip_low, config.clip_high)


@policy_loss
def reinforce(tokens: Tokens, config: Loss) -> PolicyTerm:
    """Compute -A sg(clip(r, 1 - e_low, 1 + e_high)) theta (Williams 1992, with a bounded importance weight)."""
    ratio, low, high = tokens.ratio().detach(), 1 - config.clip_low, 1 + config.clip_high
    loss = -tokens.advantages * ratio.clamp(low, high) * tokens.logprobs
    return PolicyTerm(loss, *_past(tokens.advantages, ratio, low, high))


@policy_loss
def dppo_tv(tokens: Tokens, config: Loss) -> PolicyTerm:
    """Compute -A r with r = exp(theta - mu); 0 where A (r - 1) > 0 and the divergence exceeds clip_high (DPPO, arXiv 2602.04879).

    The divergence is between two distributions over "this token" and "any other", with probabilities p = exp(mu) and q =
    exp(theta): |p - q|, the total variation.
    """
    return _dppo(tokens, config, "tv")


@policy_loss
def dppo_kl(tokens: Tokens, config: Loss) -> PolicyTerm:
    """Compute `dppo_tv` with the Kullback-Leibler divergence, p log(p / q) + (1 - p) log((1 - p) / (1 - q))."""
    return _dppo(tokens, config, "kl")


def _dppo(tokens: Tokens, config: Loss, kind: str) -> PolicyTerm:
    moved = tokens.logprobs - tokens.behaviour
    with torch.no_grad():
        distance = binary_divergence(tokens.behaviour, tokens.logprobs, kind)
        low, high = ((distance > config.clip_high) & side for side in _past(tokens.advantages, moved, 0.0, 0.0))
    return PolicyTerm((-tokens.advantages * bounded(moved).exp()).masked_fill(low | high, 0.0), low, high)


def binary_divergence(behaviour: Tensor, logprobs: Tensor, kind: str) -> Tensor:
    """Return the divergence [R] of "the token or another" under two policies, from their logprobs [R]; see `dppo_…`."""
    p, q = behaviour.exp(), logprobs.exp()
    if kind == "tv":
        return (p - q).abs()
    not_p, not_q = ((-torch.expm1(one)).clamp(min=0) for one in (behaviour, logprobs))  # 1 - p, exact where p is near 1
    return p * (behaviour - logprobs) + torch.xlogy(not_p, not_p) - torch.xlogy(not_p, not_q)


def _clipped(advantages: Tensor, ratio: Tensor, low: float, high: float) -> PolicyTerm:
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    return PolicyTerm(loss, *_past(advantages, ratio, 1 - low, 1 + high))


def _past(advantages: Tensor, values: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return where the ratio is already past a bound and the advantage pushes it further: below `low`, above `high`."""
    return (advantages < 0) & (values < low), (advantages > 0) & (values > high)
