"""Estimators of the KL to the reference policy, per token: D = clamp(theta - ref, +-40), r = exp(theta - old)."""

from __future__ import annotations

import torch
from torch import Tensor

from services.trainer.losses.tokens import Tokens

MAX_LOG_KL = 40.0
"""Bound of |theta - ref| before exp: e^40 = 2.4e17, whose square stays finite in float32."""

ESTIMATORS = ("k0", "k1", "k2", "k3")


def reference_kl(tokens: Tokens, estimator: str) -> Tensor:
    """KL estimate per token, [R]: k0 D, k1 D^2/2, k2 expm1(-D) + D, k3 r D.

    Schulman 2020, "Approximating KL divergence", calls the first three k1, k2 and k3; k2 is what TRL adds to its loss.
    """
    if tokens.reference is None:
        raise ValueError("loss.kl_beta > 0 needs reference logprobs")
    difference = (tokens.logprobs - tokens.reference).clamp(-MAX_LOG_KL, MAX_LOG_KL)
    match estimator:
        case "k0":
            return difference
        case "k1":
            return difference.square() / 2
        case "k2":
            return torch.expm1(-difference) + difference
        case "k3":
            return tokens.ratio() * difference
    raise ValueError(f"loss.kl_estimator = {estimator!r} is not one of {', '.join(ESTIMATORS)}")
