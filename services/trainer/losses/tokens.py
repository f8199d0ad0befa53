"""What a policy loss takes and returns, and what follows from it: means over responses, the KL to the reference."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

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
