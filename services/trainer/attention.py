"""Block-diagonal causal attention over packed rows, for Hugging Face models through transformers' attention registry.

Guarantees: a response attends to nothing outside itself. FlashAttention's variable-length kernel does that by
`cu_seqlens`; without it each response becomes one entry of a padded batch, so that tokens of two responses never meet in
one product. Responses are batched by length (powers of two), so padding at most doubles the work. Memory is linear in the row:
there is no T x T mask, and a sliding window is worked off in blocks of queries.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "packed"
"""Name under which transformers knows the function, for `attn_implementation`."""

SMALLEST_BLOCK = 128
"""Queries of a sliding window that are worked off at a time, at least: fewer would be many small products."""


class UnsupportedModel(ValueError):
    """The model does something in attention or behind its output matrix that packed training does not do."""


@dataclass(frozen=True)
class Bucket:
    """Responses of similar length: [count, length] places, of which `slots` are filled from tokens `tokens` of the row."""

    tokens: Tensor  # [m] int64
    slots: Tensor  # [m] int64, places in the flattened [count * length]
    count: int
    length: int


@dataclass(frozen=True)
class Packing:
    """Where responses lie in a row of T tokens."""

    cu_seqlens: Tensor  # [n + 1] int32, from 0 to T
    longest: int
    buckets: tuple[Bucket, ...]

    @classmethod
    def of(cls, lengths: list[int]) -> Packing:
        """The packing of sequences of these lengths (each >= 1), end to end."""
        sizes = torch.tensor(lengths)
        ends = sizes.cumsum(0)
        starts = ends - sizes
        exponents = torch.tensor([(length - 1).bit_length() for length in lengths])
        buckets = tuple(_bucket(starts[exponents == e], sizes[exponents == e]) for e in exponents.unique())
        return cls(F.pad(ends, (1, 0)).to(torch.int32), max(lengths), buckets)

    def to(self, device: torch.device) -> Packing:
        """The same on `device`."""
        buckets = tuple(Bucket(b.tokens.to(device), b.slots.to(device), b.count, b.length) for b in self.buckets)
        return Packing(self.cu_seqlens.to(device), self.longest, buckets)


def _bucket(starts: Tensor, sizes: Tensor) -> Bucket:
    length = int(sizes.max())
    offsets = torch.arange(length)
    filled = offsets < sizes[:, None]
    return Bucket((starts[:, None] + offsets)[filled], filled.flatten().nonzero().squeeze(1), len(sizes), length)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one packed row. query [1, heads, T, D], key and value [1, kv heads, T, D]; returns [1, T, heads, D].

    Positions, caches and the like, which transformers passes along, have no meaning here.
    """
    if softcap is not None or s_aux is not None or dropout:
        raise UnsupportedModel(
            f"{type(module).__name__} uses softcap, sinks or dropout in attention, which packed rows do not have"
        )
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))  # [T, heads, D]
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and importlib.util.find_spec("flash_attn"):
        return _flash(q, k, v, packing, scaling, sliding_window)[None], None
    return _padded(q, k, v, packing, scaling, sliding_window)[None], None


class _Move(torch.autograd.Function):
    """Takes places `origin` of a tensor to places `target` of a new one, zeros elsewhere. No place comes twice on either side.

    So its gradient moves back the same way; that of `index_select` would be added up, place by place, as if they could.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, origin: Tensor, target: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(origin, target)
        ctx.size = len(states)
        return _moved(states, origin, target, size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        origin, target = ctx.saved_tensors
        return _moved(gradients[0], target, origin, ctx.size), None, None, None


def _moved(states: Tensor, origin: Tensor, target: Tensor, size: int) -> Tensor:
    return states.new_zeros(size, *states.shape[1:]).index_copy_(0, target, states.index_select(0, origin))


def _padded(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float | None, sliding_window: int | None) -> Tensor:
    """Attention of every bucket as a padded batch, [T, heads, D]. Padding is zeros, behind the end of each response."""
    buckets, places, ends = packing.buckets, [], [0]
    for bucket in buckets:
        places.append(bucket.slots + ends[-1])
        ends.append(ends[-1] + bucket.count * bucket.length)
    tokens, slots = torch.cat([bucket.tokens for bucket in buckets]), torch.cat(places)

    def pad(states: Tensor) -> list[Tensor]:  # [T, heads, D] -> [count, heads, length, D] of each bucket
        flat: Tensor = _Move.apply(states, tokens, slots, ends[-1])  # pyright: ignore[reportAssignmentType]
        pieces = flat.split([bucket.count * bucket.length for bucket in buckets])
        return [
            piece.view(bucket.count, bucket.length, *states.shape[1:]).transpose(1, 2)
            for piece, bucket in zip(pieces, buckets, strict=True)
        ]

    outputs, grouped = [], q.shape[1] != k.shape[1]
    for queries, keys, values in zip(pad(q), pad(k), pad(v), strict=True):
        if sliding_window is not None and sliding_window < queries.shape[2]:
            output = _windowed(queries, keys, values, scaling, sliding_window, grouped)
        else:
            output = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling, enable_gqa=grouped)
        outputs.append(output.transpose(1, 2).reshape(-1, *q.shape[1:]))
    return _Move.apply(torch.cat(outputs), slots, tokens, len(q))  # pyright: ignore[reportReturnType]


def _windowed(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int, grouped: bool) -> Tensor:
    """Causal attention to the last `window` places, all [count, heads, length, D]; a block of queries gets the keys it needs."""
    length, block = q.shape[2], max(window, SMALLEST_BLOCK)
    masks: dict[tuple[int, int], Tensor] = {}  # shared, as every call keeps its mask for backward
    outputs = []
    for start in range(0, length, block):
        end, first = min(start + block, length), max(0, start - window + 1)
        shape = (end - start, end - first)
        if shape not in masks:
            distance = torch.arange(start, end, device=q.device)[:, None] - torch.arange(first, end, device=q.device)
            banned = (distance < 0) | (distance >= window)
            masks[shape] = q.new_zeros(shape).masked_fill(banned, -torch.inf)
        keys, values = k[:, :, first:end], v[:, :, first:end]
        outputs.append(
            F.scaled_dot_product_attention(
                q[:, :, start:end], keys, values, attn_mask=masks[shape], scale=scaling, enable_gqa=grouped
            )
        )
    return torch.cat(outputs, 2)


def _flash(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float | None, sliding_window: int | None) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    return flash_attn_varlen_func(
        q,
        k,
        v,
        packing.cu_seqlens,
        packing.cu_seqlens,
        packing.longest,
        packing.longest,
        softmax_scale=scaling,
        causal=True,
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
