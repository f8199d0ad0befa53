"""Attention over a packed row by PyTorch's FlexAttention, for `trainer.attention = "flex"`.

Guarantees: a prompt's keys and values are read where they are, once, however many responses share it: nothing is padded or
copied. Blocks of 128 x 128 scores that no token needs are not computed. The mask of a row is computed once for all layers.

It needs a GPU, since FlexAttention has no backward pass on a CPU. It has not run on one yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from services.trainer.model.attention.explicit import ScoreRule
from services.trainer.model.attention.packing import Packing

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

KERNEL = {"BACKEND": "TRITON"}
"""For rows of fewer than 128 tokens, as a model is proven with, it would choose a kernel for decoding instead."""


@dataclass
class RowMasks:
    """The masks of one row, by sliding window. They are kept until the next row, as layers with the same window share one."""

    packing: Packing | None = None
    by_window: dict[int | None, BlockMask] = field(default_factory=dict[int | None, BlockMask])

    def of(self, packing: Packing, window: int | None, device: torch.device) -> BlockMask:
        """Return the mask of a row under a window."""
        if self.packing is not packing:
            self.packing, self.by_window = packing, {}
        if window not in self.by_window:
            tokens = int(packing.own[-1])
            self.by_window[window] = create_block_mask(
                sees(packing, window), None, None, tokens, tokens, device=str(device), _compile=device.type == "cuda"
            )
        return self.by_window[window]


masks = RowMasks()


def sees(packing: Packing, window: int | None = None) -> Rule:
    """Return the rule by which a token, at place `q` of the row, sees the token at place `k`."""
    first, sizes = packing.own[:-1].long(), packing.own.diff().long()
    begins, before = packing.prompts
    owner = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
    tokens = torch.arange(len(owner), device=sizes.device)
    position = tokens - first[owner] + before[owner]  # in its whole sequence
    prompt_begin, prompt_end = begins[owner], (begins + before)[owner]

    def rule(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = (owner[q] == owner[k]) & (q >= k)
        seen = own | ((k >= prompt_begin[q]) & (k < prompt_end[q]))
        return seen if window is None else seen & (position[q] - position[k] < window)

    return rule


def flexible(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scores: ScoreRule) -> Tensor:
    """Compute the attention of a row, [T, heads, E]: q [T, heads, D], k [T, kv heads, D], v [T, kv heads, E]; no sinks."""
    query, key, value = (states.transpose(0, 1)[None] for states in (q, k, v))
    run: Any = functools.partial(_compiled(), kernel_options=KERNEL) if q.is_cuda else flex_attention
    output = run(
        query, key, value, score_mod=None if scores.softcap is None else _cap(scores.softcap),
        block_mask=masks.of(packing, scores.window, q.device), scale=scores.scaling, enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return output[0].transpose(0, 1)


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention)


@functools.cache
def _cap(softcap: float) -> Any:
    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped
