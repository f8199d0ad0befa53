"""The train/inference correction: importance weights of tokens between the policy that generated and the one that trains.

d = clamp(old - mu, +-10), rho = exp(d). The weight is rho bounded from above, truncated importance sampling (Yao et al. 2025);
masks set it to 0 where rho is no longer reliable. A token of weight 0 still counts in the denominator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.config.loss import Loss
from services.trainer.losses.tokens import Tokens, response_mean

MAX_LOG_CORRECTION = 10.0
"""Bound of |old - mu| before exp: e^10 = 22026 is far above any sensible weight bound and far below overflow."""

EDGE = 1e-6
"""Share of a mask's bound by which a ratio may miss it: bounds are inclusive, and rho has float32 rounding."""


@dataclass(frozen=True)
class Correction:
    """Correction of R tokens; no gradient."""

    ratio: Tensor  # [R] rho
    weights: Tensor  # [R] factor of the policy loss
    clipped: Tensor  # [R] bool, the weight was clipped to its bound
    dropped: Tensor  # [R] bool, a mask set the weight to 0


def counted(behaviour: Tensor) -> Tensor:
    """Return which tokens count, bool shaped like `behaviour`: those with a finite behaviour logprob."""
    return behaviour.isfinite()


def counted_places(behaviour: Tensor) -> Tensor:
    """Return the places of the tokens that count, ascending, int64. Waits for the device of `behaviour`."""
    return counted(behaviour).nonzero().squeeze(-1)


def log_ratio(old: Tensor, behaviour: Tensor) -> Tensor:
    """Return d, [R]."""
    return (old - behaviour).clamp(-MAX_LOG_CORRECTION, MAX_LOG_CORRECTION)


@torch.no_grad()
def correct(tokens: Tokens, config: Loss) -> Correction:
    """Return the weights of tokens, which must all have a finite behaviour logprob.

    Masks apply to tokens by rho (IcePop), to whole responses by the geometric mean of rho over the response (the sequence mask of
    DeepSeek-V3.2, on the ratio), and to tokens with sign(d) A > 0 in responses where the mean of |rho - 1| / 2, which estimates
    the total variation between old and mu, exceeds its bound (after VACO, Honari et al. 2026).
    """
    d = log_ratio(tokens.old, tokens.behaviour)
    rho = d.exp()
    dropped = torch.zeros_like(rho, dtype=torch.bool)
    for kind, bounds in config.correction_mask.items():
        match kind:
            case "token":
                dropped |= _outside(rho, bounds)
            case "sequence":
                dropped |= _outside(response_mean(d, tokens).exp(), bounds)
            case "variation":
                variation = response_mean((rho - 1).abs() / 2, tokens)
                dropped |= (variation > bounds[0]) & (d.sign() * tokens.advantages > 0)
    truncated = rho.clamp(max=config.correction_upper)
    return Correction(rho, truncated.masked_fill(dropped, 0.0), (truncated != rho) & ~dropped, dropped)


def _outside(ratio: Tensor, bounds: Sequence[float]) -> Tensor:
    lower, upper = bounds
    return (ratio < lower * (1 - EDGE)) | (ratio > upper * (1 + EDGE))
