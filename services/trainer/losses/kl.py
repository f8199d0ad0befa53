"""Estimators of the KL to the reference policy, per token: D = clamp(theta - ref, +-40), r = exp(theta - old)."""

from __future__ import annotations

import torch
from torch import Tensor

from services.trainer.losses.tokens import Tokens

MAX_LOG_KL = 40.0
"""Bound of |theta - ref| before exp: e^40 = 2.4e17, whose square stays finite in float32."""

ESTIMATORS = ("k1", "k2", "k3", "k1_weighted")


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
