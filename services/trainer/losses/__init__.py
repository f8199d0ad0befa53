"""The loss of a training step, from policy losses to reported metrics.

Guarantees: the value is the sum over the given tokens divided by the given denominator and depends on nothing else. So losses of
rows add up, and the gradient of a step is the same however tokens are spread over rows, micro-batches and ranks. Sequence-level
operations act per response; a row holds several responses, each whole. Tokens with a non-finite behaviour logprob contribute
nothing. With what the host knows of the row, its counted tokens and the number of its responses, nothing waits for the device.

The train/inference correction: d = clamp(old - mu, +-10), rho = exp(d). The weight is rho bounded from above, truncated
importance sampling (Yao et al. 2025); masks set it to 0 where rho is no longer reliable. A token of weight 0 still counts in the
denominator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from services.config.loss import DPPO, Loss
from services.groups.histograms import BOUNDS
from services.trainer.losses.policies import ESTIMATORS, PolicyTerm, Tokens, find, reference_kl, response_mean

MAX_LOG_CORRECTION = 10.0
"""Bound of |old - mu| before exp: e^10 = 22026 is far above any sensible weight bound and far below overflow."""

EDGE = 1e-6
"""Share of a mask's bound by which a ratio may miss it: bounds are inclusive, and rho has float32 rounding."""

SUMS = (
    *("loss", "tokens", "policy_loss", "clip_low", "clip_high", "ratio", "ratio_squared", "entropy"),
    *("rho", "rho_weight", "rho_clipped", "rho_dropped", "logprob_gap", "advantage", "kl", *ESTIMATORS),
)
MAXIMA = ("logprob_gap", "advantage", "negative_advantage")
HISTOGRAMS = ("ratio", "advantage", "logprob_gap")
"""Measures of a token whose histograms are kept, and the first of `measure`."""
COUNTS = "counts"
"""Name in addition to those of `SUMS`: the counts of all bins of `HISTOGRAMS`, one after the other."""


@dataclass(frozen=True)
class LossOutput:
    """Holds the loss of a row and its statistics. `sums` and `maxima` are over its counted tokens (`measure`)."""

    loss: Tensor  # scalar
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]
    learning: Tensor  # [R] bool: counted, and the policy has not moved past the clip bounds since the token was sampled


def compute(
    tokens: Tokens, config: Loss, denominator: float, places: Tensor | None = None, from_behaviour: bool = False
) -> LossOutput:
    """Compute the loss of a row:

    (sum over counted tokens of weight * share * (c * policy loss + kl_beta * KL - entropy_coefficient * H)) / denominator.

    c = the correction's weight; KL and entropy are not corrected. weight = the importance weight of the token's group (Schaul et
    al. 2016, section 3.4), which the denominator ignores. share: see denominators.py. Without tokens the loss is 0 and still has
    a gradient (of zeros), so that an empty row takes part in backward.

    `places`: those of the counted tokens (`counted_places`). Without them, it waits for the device to find them.
    `from_behaviour`: whether mu takes the place of `old` (`Loss.from_behaviour`).
    """
    size = len(tokens.behaviour)
    places = counted_places(tokens.behaviour) if places is None else places
    if len(places) < size:
        tokens = tokens.only(places)
    from_behaviour = from_behaviour or config.policy in DPPO
    if from_behaviour:
        tokens = replace(tokens, old=tokens.behaviour)
    term = find(config.policy)(tokens, config)
    correction = correct(tokens, config)
    loss = correction.weights * term.loss
    if config.kl_beta > 0:
        loss = loss + config.kl_beta * reference_kl(tokens)
    if config.entropy_coefficient > 0:
        loss = loss - config.entropy_coefficient * tokens.entropy
    total = (tokens.weights * tokens.shares * loss).sum() / denominator
    sums, maxima = measure(tokens, term, correction, total, from_behaviour)
    with torch.no_grad():  # clip flags from mu on show how far the policy has moved since a token was sampled, whenever that was
        since = term if from_behaviour else find(config.policy)(replace(tokens, old=tokens.behaviour), config)
    learning = ~(since.clipped_low | since.clipped_high)
    if len(places) < size:
        learning = learning.new_zeros(size).index_copy(0, places, learning)
    return LossOutput(total, sums, maxima, learning)


def has_gradient(advantages: Tensor, weights: Tensor, config: Loss) -> bool:
    """Return whether a row whose tokens have these advantages and importance weights, [R] each, changes the policy."""
    return not config.learns_from_advantages_alone or bool(((advantages != 0) & (weights != 0)).any())


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
