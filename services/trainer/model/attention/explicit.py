"""Attention whose scores only FlashAttention 4 computes otherwise: capped, or with a sink.

Guarantees: scores exist for one block of queries at a time, in forward and in backward, which computes them again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SMALLEST_BLOCK = 128
"""Minimum number of queries of a sliding window that are computed at a time: with fewer there would be many small products."""


@dataclass(frozen=True)
class ScoreRule:
    """How a layer computes its attention scores.

    Capped scores are softcap x tanh(score / softcap) (Gemma 2); a sink is a key without a value that takes its share of the
    softmax (gpt-oss).
    """

    scaling: float
    window: int | None = None  # places that a query sees, itself included
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads], the score of each head's sink


def explicit(q: Tensor, k: Tensor, v: Tensor, scores: ScoreRule) -> Tensor:
    """Compute causal attention, q [count, heads, length, D], k and v with as many heads or a divisor of them."""
    groups = q.shape[1] // k.shape[1]
    k, v = (states.repeat_interleave(groups, 1) for states in (k, v))
    length, outputs = q.shape[2], []
    block = max(scores.window or 0, SMALLEST_BLOCK)
    for start in range(0, length, block):
        end = min(start + block, length)
        first = 0 if scores.window is None else max(0, start - scores.window + 1)
        keys, values = k[:, :, first:end], v[:, :, first:end]
        outputs.append(checkpoint(_block, q[:, :, start:end], keys, values, start - first, scores, use_reentrant=False))
    return torch.cat(outputs, 2)  # pyright: ignore[reportCallIssue, reportArgumentType]


def _block(q: Tensor, k: Tensor, v: Tensor, before: int, scores: ScoreRule) -> Tensor:
    """Compute a block of queries, the first of which has `before` keys before its own."""
    values = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scores.scaling
    if scores.softcap is not None:
        values = torch.tanh(values / scores.softcap) * scores.softcap
    place = torch.arange(q.shape[2], device=q.device)[:, None] + before
    distance = place - torch.arange(k.shape[2], device=q.device)
    banned = distance < 0 if scores.window is None else (distance < 0) | (distance >= scores.window)
    values = values.masked_fill(banned, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.to(values.dtype).view(1, -1, 1, 1).expand(*values.shape[:3], 1)
        values = torch.cat((values, sinks), -1)
    return values.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v
