"""Policy losses: pure functions of named tensors, one for each name of `loss.policy`, and the user's own.

Symbols (docs/semantics.md): theta = current policy, old = policy at the start of the training step, mu = the policy that
generated (behaviour); r = exp(theta - old), A = advantage, e = clip distance, sg = stop gradient.

`loss.policy = "package.module:function"` names a function of (`Tokens`, `Loss`) that returns a `PolicyTerm`; correction, KL,
entropy bonus, importance weights and denominator are applied to what it returns. A function that cannot be loaded, or that
returns the wrong type or shape for three tokens, is a `ConfigError` that names `loss.policy`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from services.config import ConfigError
from services.config.loss import POLICIES, Loss
from services.runtime.own_code import reported_as

MAX_LOG_RATIO = 20.0
"""Bound of |theta - old| before exp, as in verl: e^20 = 4.9e8. Where `old` is a generator's logprob, it limits how much more than
others its tokens can weigh in the gradient; with e^40 a few such tokens make the gradient norm infinite in float32.
"""


MAX_LOG_KL = 40.0
"""Bound of |theta - ref| before exp: e^40 = 2.4e17, whose square stays finite in float32."""

ESTIMATORS = ("k1", "k2", "k3", "k1_weighted")


@dataclass(frozen=True)
class Tokens:
    """Response tokens of one row that are in the loss; R = their number. All tensors are [R], logprobs float32."""

    logprobs: Tensor  # theta; carries the gradient
    old: Tensor  # no gradient
    behaviour: Tensor  # mu; a token with NaN or infinity is excluded
    reference: Tensor | None  # ref; None only with kl_beta = 0
    advantages: Tensor
    weights: Tensor  # importance weight of the token's group
    shares: Tensor  # factor that makes the sum a mean of means (denominators.py); 1 for token means
    entropy: Tensor  # carries a gradient only if there is an entropy bonus
    samples: Tensor  # int64, the response of the row that a token belongs to
    responses: int | None = None  # of the row, more than any of `samples`; None if only the device knows

    def only(self, places: Tensor) -> Tokens:
        """Return the tokens at `places`, int64."""
        columns: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        chosen = {name: column.index_select(0, places) for name, column in columns.items() if isinstance(column, Tensor)}
        return replace(self, **chosen)

    def ratio(self) -> Tensor:
        """Return r = exp(theta - old), [R]."""
        return bounded(self.logprobs - self.old).exp()


@dataclass(frozen=True)
class PolicyTerm:
    """What a policy loss returns, [R] each. Clipped: the ratio is past that bound and the advantage would push it further."""

    loss: Tensor
    clipped_low: Tensor  # bool
    clipped_high: Tensor  # bool


def bounded(difference: Tensor) -> Tensor:
    """Clamp a log-ratio to a range that exp can represent."""
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def response_mean(values: Tensor, tokens: Tokens) -> Tensor:
    """Return at each of the tokens [R] the mean of `values` [R] over the tokens of its response. Differentiable.

    Sums in float64: a response has tens of thousands of tokens, and their mean affects all of them. Waits for the device unless
    `tokens.responses` is known.
    """
    samples = tokens.samples
    if not len(samples):
        return values
    responses = int(samples.max()) + 1 if tokens.responses is None else tokens.responses
    wide = values.double()
    nothing = wide.new_zeros(responses)
    sums, counts = (nothing.index_add(0, samples, each) for each in (wide, torch.ones_like(wide)))
    return (sums / counts.clamp(min=1))[samples].to(values.dtype)


def reference_kl(tokens: Tokens, estimator: str = "k3") -> Tensor:
    """Return the KL estimate per token, [R]: k1 D, k2 D^2/2, k3 expm1(-D) + D, k1_weighted r D.

    The names are those of Schulman 2020, "Approximating KL divergence"; k3 is what the loss has, as TRL's.
    """
    if tokens.reference is None:
        raise ValueError("loss.kl_beta > 0 needs reference logprobs")
    difference = (tokens.logprobs - tokens.reference).clamp(-MAX_LOG_KL, MAX_LOG_KL)
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return torch.expm1(-difference) + difference
        case "k1_weighted":
            return tokens.ratio() * difference
    raise ValueError(f"{estimator!r} is not one of {', '.join(ESTIMATORS)}")


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


@cache
def find(name: str) -> PolicyLoss:
    """Return the policy loss that `loss.policy` names. Raises `ConfigError`."""
    if name in POLICIES:
        return POLICY_LOSSES[name]
    module, _, function = name.partition(":")
    with reported_as(lambda why: ConfigError(f"loss.policy = {name!r} cannot be loaded ({why}): fix the name or the module")):
        return getattr(importlib.import_module(module), function)


def check(config: Loss) -> None:
    """Load the policy loss and try it on three tokens of two responses. Raises `ConfigError`."""
    policy = find(config.policy)
    logprobs = torch.tensor([-0.5, -1.0, -2.0], requires_grad=True)
    frozen, ones = logprobs.detach(), torch.ones(3)
    tokens = Tokens(logprobs, frozen, frozen, frozen, torch.tensor([1.0, 1.0, -1.0]), ones, ones, ones, torch.tensor([0, 0, 1]))
    with reported_as(lambda why: ConfigError(f"loss.policy = {config.policy!r} fails on three test tokens, fix it: {why}")):
        term = policy(tokens, config)
    if fault := _fault(term):
        raise ConfigError(f"loss.policy = {config.policy!r} must return a PolicyTerm of tensors [R], fix it: {fault}")


def _fault(term: object) -> str:
    """Return what is wrong with the result for three tokens, or an empty string."""
    if not isinstance(term, PolicyTerm):
        return f"it returns {type(term).__name__}"
    for name in ("loss", "clipped_low", "clipped_high"):
        value = getattr(term, name)
        if not isinstance(value, torch.Tensor) or value.shape != (3,):
            return f"for three tokens, `{name}` is {tuple(value.shape) if isinstance(value, torch.Tensor) else value!r}"
        if name != "loss" and value.dtype != torch.bool:
            return f"`{name}` is {value.dtype}, not bool"
    if not term.loss.isfinite().all():
        return f"its loss is {term.loss.tolist()}"
    return "" if term.loss.requires_grad else "its loss carries no gradient of the logprobs"
