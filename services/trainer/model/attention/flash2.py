"""FlashAttention 2 over sequences of any length, as PyTorch has it."""

from __future__ import annotations

import torch
from torch import Tensor

from services.trainer.model.attention.explicit import ScoreRule
from services.trainer.model.attention.packing import Packing

LARGEST_HEAD = 256


def computes(q: Tensor, k: Tensor, v: Tensor, scores: ScoreRule) -> bool:
    """Return whether it computes these heads, [T, heads, D], under these rules for scores. May be compiled."""
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    size = q.shape[-1]
    return size == v.shape[-1] <= LARGEST_HEAD and size % 8 == 0 and scores.softcap is None and scores.sinks is None


def forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scores: ScoreRule) -> tuple[Tensor, Tensor]:
    """Compute attention over sequences, [T, heads, D], and its normalisers, [heads, T].

    q holds the sequences' own tokens, k and v all, last aligned with last.
    """
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *_lengths(packing), 0.0, True, False, scale=scores.scaling, **windows(scores)
    )
    return out, lse


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packing: Packing, scores: ScoreRule
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v as `forward` had them."""
    random, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0)  # there is no dropout
    return torch.ops.aten._flash_attention_backward(
        *(gradient, q, k, v, out, lse), *_lengths(packing), 0.0, True, random, unused, scale=scores.scaling, **windows(scores)
    )


def _lengths(packing: Packing) -> tuple[Tensor, Tensor, int, int]:
    return packing.own, packing.whole, packing.longest_own, packing.longest


def windows(scores: ScoreRule) -> dict[str, int]:
    """Return the arguments, of both versions, for how far a token sees to either side; none without a window."""
    return {} if scores.window is None else {"window_size_left": scores.window - 1, "window_size_right": 0}
