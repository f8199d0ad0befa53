"""The weight that an adapted layer has: one formula for the trainer and for readers that receive only the adapter."""

from __future__ import annotations

import torch


@torch.no_grad()
def merged(parts: list[torch.Tensor], scale: float) -> torch.Tensor:
    """Return W + scale B A of `parts` W, A and B; or W itself if there is no adapter.

    A and B are rounded to W's dtype, in which they travel; the rest is computed in float32 and rounded once.
    """
    if len(parts) == 1:
        return parts[0].detach()
    weight, a, b = parts
    a, b = (matrix.to(weight.dtype).float() for matrix in (a, b))
    return torch.addmm(weight.float(), b, a, alpha=scale).to(weight.dtype)
