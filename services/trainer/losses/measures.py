"""Statistics of the tokens of a row."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from services.algorithm.histograms import BOUNDS
from services.config.loss import Loss
from services.trainer.losses.correction import Correction
from services.trainer.losses.kl import ESTIMATORS, reference_kl
from services.trainer.losses.tokens import PolicyTerm, Tokens

SUMS = (
    "loss", "tokens", "policy_loss", "clip_low", "clip_high", "ratio", "ratio_squared", "entropy", "rho", "rho_weight",
    "rho_clipped", "rho_dropped", "logprob_gap", "advantage", "kl", *ESTIMATORS,
)  # fmt: skip
MAXIMA = ("logprob_gap", "advantage", "negative_advantage")
HISTOGRAMS = ("ratio", "advantage", "logprob_gap")
"""Measures of a token whose histograms are kept."""
COUNTS = "counts"
"""Name in addition to those of `SUMS`: the counts of all bins of `HISTOGRAMS`, one after the other."""


@torch.no_grad()
def measure(
    tokens: Tokens, config: Loss, term: PolicyTerm, correction: Correction, loss: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return `SUMS` and `MAXIMA` by name, float64 scalars, over the tokens, with the row's `loss`; and `COUNTS`, float64 [bins].
    Without a reference, KLs are 0.
    """
    ratio = tokens.ratio()
    # The policy at the start of the step. Where mu stands in for it, theta is the closest approximation.
    start = tokens.logprobs if config.from_behaviour else tokens.old
    gap = (tokens.behaviour - start).abs()
    nothing = torch.zeros_like(ratio)
    kls = {name: nothing if tokens.reference is None else reference_kl(tokens, name) for name in ESTIMATORS}
    per_token = {
        "tokens": torch.ones_like(ratio),
        "policy_loss": term.loss,
        "clip_low": term.clipped_low,
        "clip_high": term.clipped_high,
        "ratio": ratio,
        "ratio_squared": ratio.square(),
        "entropy": tokens.entropy,
        "rho": correction.ratio,
        "rho_weight": correction.weights,
        "rho_clipped": correction.clipped,
        "rho_dropped": correction.dropped,
        "logprob_gap": gap,
        "advantage": tokens.advantages,
        "kl": kls[config.kl_estimator],
        **kls,
    }
    sums = {name: values.double().sum() for name, values in per_token.items()} | {"loss": loss.detach().double()}
    sums[COUNTS] = torch.cat([_counts(name, per_token[name]) for name in HISTOGRAMS])
    lowest = torch.full((1,), -torch.inf, device=gap.device)
    extremes = {"logprob_gap": gap, "advantage": tokens.advantages, "negative_advantage": -tokens.advantages}
    return sums, {name: torch.cat((lowest, values)).max().double() for name, values in extremes.items()}


def _counts(name: str, values: Tensor) -> Tensor:
    """Return the counts of a histogram's bins, float64 [bins]."""
    below = (values.float().unsqueeze(-1) <= _bounds(name, values.device)).sum(0)  # unlike bincount, nothing waits for the device
    return torch.diff(pad(pad(below, (1, 0)), (0, 1), value=len(values))).double()


@cache
def _bounds(name: str, device: torch.device) -> Tensor:
    return torch.tensor(BOUNDS[name], dtype=torch.float32, device=device)
