"""Statistics of the tokens of a row."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from services.groups.histograms import BOUNDS
from services.trainer.losses.correction import Correction
from services.trainer.losses.tokens import ESTIMATORS, PolicyTerm, Tokens, reference_kl

SUMS = (
    *("loss", "tokens", "policy_loss", "clip_low", "clip_high", "ratio", "ratio_squared", "entropy"),
    *("rho", "rho_weight", "rho_clipped", "rho_dropped", "logprob_gap", "advantage", "kl", *ESTIMATORS),
)
MAXIMA = ("logprob_gap", "advantage", "negative_advantage")
HISTOGRAMS = ("ratio", "advantage", "logprob_gap")
"""Measures of a token whose histograms are kept, and the first of `measure`."""
COUNTS = "counts"
"""Name in addition to those of `SUMS`: the counts of all bins of `HISTOGRAMS`, one after the other."""


@torch.no_grad()
def measure(
    tokens: Tokens, term: PolicyTerm, correction: Correction, loss: Tensor, from_behaviour: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return `SUMS` and `MAXIMA` by name, float64 scalars, over the tokens, with the row's `loss`; and `COUNTS`, float64 [bins].
    Without a reference, KLs are 0.

    Measures are summed together: a GPU computes one in less time than a kernel takes to launch.
    """
    ratio = tokens.ratio()
    # The policy at the start of the step. Where mu stands in for it, theta is the closest approximation.
    start = tokens.logprobs if from_behaviour else tokens.old
    per_token = {
        "ratio": ratio,
        "advantage": tokens.advantages,
        "logprob_gap": (tokens.behaviour - start).abs(),
        "policy_loss": term.loss,
        "ratio_squared": ratio.square(),
        "entropy": tokens.entropy,
        "rho": correction.ratio,
        "rho_weight": correction.weights,
    }
    flags = {
        "clip_low": term.clipped_low,
        "clip_high": term.clipped_high,
        "rho_clipped": correction.clipped,
        "rho_dropped": correction.dropped,
    }
    nothing = torch.zeros((), dtype=torch.float64, device=ratio.device)
    sums = {"loss": loss.detach().double(), "tokens": nothing + len(ratio), **dict.fromkeys(ESTIMATORS, nothing)}
    if tokens.reference is not None:
        per_token |= {name: reference_kl(tokens, name) for name in ESTIMATORS}
    values = torch.stack(list(per_token.values()))
    for names, rows in ((per_token, values), (flags, torch.stack(list(flags.values())))):
        sums |= zip(names, rows.sum(1, dtype=torch.float64), strict=True)
    sums["kl"] = sums["k3"]
    sums[COUNTS] = _counts(values[: len(HISTOGRAMS)])
    extremes = torch.stack((per_token["logprob_gap"], tokens.advantages, -tokens.advantages))
    return sums, dict(zip(MAXIMA, pad(extremes, (0, 1), value=-torch.inf).amax(1).double(), strict=True))


def _counts(values: Tensor) -> Tensor:
    """Return the counts of the bins of all `HISTOGRAMS`, float64 [bins], from their values, [histograms, R]."""
    below = (values.float().unsqueeze(1) <= _edges(values.device)).sum(2)  # unlike bincount, nothing waits for the device
    bins = (counts[: len(BOUNDS[name]) + 1] for name, counts in zip(HISTOGRAMS, below.diff(), strict=True))
    return torch.cat(list(bins)).double()


@cache
def _edges(device: torch.device) -> Tensor:
    """Return the edges of the bins of `HISTOGRAMS`, [histograms, edges, 1]: NaN, which nothing is below, and the upper bounds."""
    edges = [torch.tensor([torch.nan, *BOUNDS[name], torch.inf], dtype=torch.float32) for name in HISTOGRAMS]
    return pad_sequence(edges, batch_first=True, padding_value=torch.inf).unsqueeze(-1).to(device)
