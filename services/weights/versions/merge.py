"""The weight that an adapted layer has: one formula for the trainer and for those who get the adapter alone."""

from __future__ import annotations

import torch


@torch.no_grad()
def merged(parts: list[torch.Tensor], scale: float) -> torch.Tensor:
    """Return W + scale B A of `parts` W, A and B, computed in float32 and rounded once; the tensor itself if it is alone."""
    if len(parts) == 1:
        return parts[0].detach()
    weight, a, b = parts
    return torch.addmm(weight.float(), b, a, alpha=scale).to(weight.dtype)
