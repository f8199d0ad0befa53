"""Attention over a packed row by PyTorch's FlexAttention, for `trainer.attention = "flex"`.

Guarantees: a prompt's keys and values are read where they are, once, however many responses share it: nothing is padded or
copied. Blocks of 128 x 128 scores that no token needs are not computed. The mask of a row is computed once for all layers.

It needs a GPU, since FlexAttention has no backward pass on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from services.trainer.model.attention.explicit import ScoreRule
from services.trainer.model.attention.packing import Packing

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

BLOCK = 128
"""Queries and keys of a block of scores."""

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
            self.by_window[window] = block_mask(packing, window, device)
        return self.by_window[window]


masks = RowMasks()


@dataclass(frozen=True)
class Sight:
    """What each token of a row sees: two intervals, the second in a prompt that another sequence owns; bounds [T] int64."""

    own_begin: Tensor
    own_end: Tensor
    prompt_begin: Tensor
    prompt_end: Tensor

    @classmethod
    def of(cls, packing: Packing, window: int | None, device: torch.device) -> Sight:
        """Return what the tokens of a row see under a window."""
        first, sizes = packing.own[:-1].long().to(device), packing.own.diff().long().to(device)
        begins, before = (each.to(device) for each in packing.prompts)
        owner = torch.repeat_interleave(torch.arange(len(sizes), device=device), sizes, output_size=len(packing.owned))
        tokens = torch.arange(len(owner), device=device)
        begin, prompt, prompt_end = first[owner], begins[owner], (begins + before)[owner]
        if window is not None:
            position = tokens - begin + before[owner]  # in its whole sequence
            begin = torch.maximum(begin, tokens - window + 1)
            prompt = torch.minimum(torch.maximum(prompt, prompt + position - window + 1), prompt_end)
        return cls(begin, tokens + 1, prompt, prompt_end)

    @property
    def rule(self) -> Rule:
        """The rule by which a token, at place `q` of the row, sees the token at place `k`."""
        own_begin, own_end, prompt_begin, prompt_end = self.own_begin, self.own_end, self.prompt_begin, self.prompt_end

        def rule(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return ((k >= own_begin[q]) & (k < own_end[q])) | ((k >= prompt_begin[q]) & (k < prompt_end[q]))

        return rule

    def counted(self, blocks: int) -> Tensor:
        """Return how many tokens of each block each token sees, [T, blocks]."""
        begin = torch.arange(blocks, device=self.own_begin.device) * BLOCK
        seen = (
            torch.minimum(high[:, None], begin + BLOCK) - torch.maximum(low[:, None], begin)
            for low, high in ((self.own_begin, self.own_end), (self.prompt_begin, self.prompt_end))
        )
        return sum((each.clamp_min_(0) for each in seen), torch.zeros((), dtype=torch.int64, device=begin.device))


def block_mask(packing: Packing, window: int | None, device: torch.device) -> BlockMask:
    """Return a row's mask. PyTorch's own function would look at every pair of tokens, or compile that, which can take minutes."""
    sight, tokens = Sight.of(packing, window, device), len(packing.owned)
    blocks = -(-tokens // BLOCK)
    missing = (0, 0, 0, blocks * BLOCK - tokens)
    counts = sight.counted(blocks)
    some = F.pad(counts, missing, value=0).view(blocks, BLOCK, blocks).amax(1) > 0
    full = F.pad(counts, missing, value=BLOCK).view(blocks, BLOCK, blocks).amin(1) == BLOCK
    partial, whole = (_ordered(kind) for kind in (some & ~full, full))
    return BlockMask.from_kv_blocks(*partial, *whole, BLOCK, sight.rule, (tokens, tokens))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of blocks of keys for each block of queries, and their indices, which come first."""
    indices = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int()[None, None], indices.int()[None, None]


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
