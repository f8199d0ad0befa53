"""Block-diagonal causal attention over packed rows, for Hugging Face models through transformers' attention registry.

Guarantees: a response attends to nothing outside itself. FlashAttention's variable-length kernel does that by
`cu_seqlens`; without it each response becomes one entry of a padded batch, so that tokens of two responses never meet in
one product. There is no T x T mask. Responses are batched by length (powers of two), so padding at most doubles the work.
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
    result = torch.zeros_like(q)
    for bucket in packing.buckets:
        result = result.index_copy(0, bucket.tokens, _padded(q, k, v, bucket, scaling, sliding_window))
    return result[None], None


def _padded(q: Tensor, k: Tensor, v: Tensor, bucket: Bucket, scaling: float | None, sliding_window: int | None) -> Tensor:
    """Attention of one bucket's responses, [m, heads, D] in the order of `bucket.tokens`. Padding is zeros, behind the end."""

    def pad(states: Tensor) -> Tensor:  # [T, heads, D] -> [count, heads, length, D]
        flat = states.new_zeros(bucket.count * bucket.length, *states.shape[1:])
        flat = flat.index_copy(0, bucket.slots, states.index_select(0, bucket.tokens))
        return flat.view(bucket.count, bucket.length, *states.shape[1:]).transpose(1, 2)

    mask = None
    if sliding_window is not None and sliding_window < bucket.length:
        ones = torch.ones(bucket.length, bucket.length, dtype=torch.bool, device=q.device)
        mask = ones.tril().triu(1 - sliding_window)
    grouped = q.shape[1] != k.shape[1]
    output = F.scaled_dot_product_attention(
        pad(q), pad(k), pad(v), attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )
    return output.transpose(1, 2).reshape(-1, *q.shape[1:]).index_select(0, bucket.slots)


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
