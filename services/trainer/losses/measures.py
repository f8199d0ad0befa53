"""Statistics of the tokens of a row."""

from __future__ import annotations

import torch
from torch import Tensor

from services.config.loss import Loss
from services.trainer.losses.correction import Correction
from services.trainer.losses.kl import ESTIMATORS, reference_kl
from services.trainer.losses.tokens import PolicyTerm, Tokens

SUMS = (
    "loss", "tokens", "policy_loss", "clip_low", "clip_high", "ratio", "ratio_squared", "entropy", "rho", "rho_weight",
    "rho_clipped", "rho_dropped", "logprob_gap", "advantage", "kl", *ESTIMATORS,
)  # fmt: skip
MAXIMA = ("logprob_gap", "advantage", "negative_advantage")


@torch.no_grad()
def measure(
    tokens: Tokens, config: Loss, term: PolicyTerm, correction: Correction, loss: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return `SUMS` and `MAXIMA` by name, float64 scalars, over the tokens, with the row's `loss`. Without a reference, KLs are
    0.
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
    lowest = torch.full((1,), -torch.inf, device=gap.device)
    extremes = {"logprob_gap": gap, "advantage": tokens.advantages, "negative_advantage": -tokens.advantages}
    return sums, {name: torch.cat((lowest, values)).max().double() for name, values in extremes.items()}
