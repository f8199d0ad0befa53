"""Block-diagonal causal attention over packed rows, for Hugging Face models through transformers' attention registry.

Guarantees: a response attends to its prompt and to itself, and to nothing else. Responses of one group share a prompt that is
stored in the row once: work that is linear in tokens is done once for it, and each response sees its keys and values. On a GPU a
fused kernel does that (fused.py). Elsewhere, and for scores that it does not compute, each prompt with its response becomes one
entry of a padded batch, so that tokens of two responses never meet in one product. Batches are formed by length (powers of two),
so padding at most doubles the work. Memory is linear in the tokens of sequences, which in a plan is at most twice a row's budget
(planning/packing.py): there is no T x T mask, and a sliding window is computed in blocks of queries, as are capped scores and
sinks (explicit.py). Keys and values may have heads of different size, as in multi-head latent attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from services.config import ConfigError
from services.trainer.model.attention import flash2, fused
from services.trainer.model.attention.explicit import SMALLEST_BLOCK, ScoreRule, explicit
from services.trainer.model.attention.packing import Packing, Shared, flat, gathered, row

NAME = "packed"
"""Name under which transformers knows the function, for `attn_implementation`."""


class UnsupportedModel(ConfigError):
    """The model of `model.path` has a feature that packed training would compute incorrectly."""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error is a lack of memory, which says nothing about the model. On CPUs torch has no type for it."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one packed row, [1, T, heads, E].

    query [1, heads, T, D], key [1, kv heads, T, D], value [1, kv heads, T, E]. `softcap` bounds scores (Gemma 2);
    `s_aux` [heads] are the scores of a sink without a value (gpt-oss). Positions, caches and other arguments that transformers
    passes are ignored. Raises `UnsupportedModel` for a mask of the model's own, which would be ignored too, and for dropout.
    """
    if attention_mask is not None or dropout:
        what = "dropout" if dropout else "an attention mask of its own"
        raise UnsupportedModel(f"{type(module).__name__} uses {what} in attention, which packed rows do not support")
    packing = packing or row.packing
    if packing is None or len(packing.owned) != query.shape[2]:
        raise UnsupportedModel(f"{type(module).__name__} attends to {query.shape[2]} tokens, which are not those of the row")
    if s_aux is not None and len(s_aux) != query.shape[1]:
        raise UnsupportedModel(f"{type(module).__name__} has {len(s_aux)} sinks for {query.shape[1]} heads")
    q, k, v = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))  # [T, heads, D]; a view in backward, too
    scores = ScoreRule(q.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    if fused.kernels_of(fused.available(), q, k, v, scores):
        row.packing = packing
        return fused.attend(q, k, v, scores)[None], None
    return _padded(q, k, v, packing, scores)[None], None


def takes_groups(q: Tensor, v: Tensor, masked: bool) -> bool:
    """Return whether PyTorch has a kernel for groups of queries that share a head of keys and values.

    Of its kernels for GPUs only FlashAttention does, which takes no mask, no float32 and no large heads, or heads of different
    size. Instead of another it would choose the plain computation, which keeps all scores of a batch.
    """
    if not q.is_cuda:
        return True
    half = q.dtype in (torch.bfloat16, torch.float16)
    return half and not masked and q.shape[-1] == v.shape[-1] <= flash2.LARGEST_HEAD


class _Lay(torch.autograd.Function):
    """Lays tokens out in their places, [P, ...] from [T, ...], in one pass. Padding holds any token, and its gradient is 0.

    The gradient of owned tokens is read from their places; `index_select` would add it up token by token, which only shared
    tokens need. Queries have none: without `shared`, places of tokens that others own are padding.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, packing: Packing, shared: Shared | None) -> Tensor:
        ctx.packing, ctx.shared = packing, shared
        return states.index_select(0, packing.filled)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,), owned, shared = gradients, ctx.packing.owned, ctx.shared
        back = gradient.index_select(0, owned) if shared is None else gathered(gradient, owned, shared.slots, shared)
        return back, None, None


class _Take(torch.autograd.Function):
    """Takes owned tokens from their places, [T, ...] from [P, ...]. The gradient is 0 elsewhere."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, packing: Packing) -> Tensor:
        ctx.packing = packing
        return states.index_select(0, packing.owned)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,), packing = gradients, ctx.packing
        laid = gradient.new_zeros(len(packing.filled), *gradient.shape[1:])
        return laid.index_copy_(0, packing.owned, gradient), None


def _padded(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scores: ScoreRule) -> Tensor:
    """Compute the attention of every batch of sequences, [T, heads, E].

    Padding is after the end of each sequence, where no query of the sequence sees it. Its output, and that of the queries of
    prompts that others own, is dropped.
    """

    def pad(states: Tensor, shared: Shared | None) -> list[Tensor]:
        return packing.batches(_Lay.apply(states, packing, shared))  # pyright: ignore[reportArgumentType]

    outputs, groups, shared = list[Tensor](), q.shape[1] // k.shape[1], packing.shared
    for queries, keys, values in zip(pad(q, None), pad(k, shared), pad(v, shared), strict=True):
        if scores.softcap is not None or scores.sinks is not None:
            output = explicit(queries, keys, values, scores)
        else:
            window = scores.window if scores.window is not None and scores.window < queries.shape[2] else None
            grouped = groups > 1 and takes_groups(q, v, window is not None)
            if groups > 1 and not grouped:
                keys, values = (states.repeat_interleave(groups, 1) for states in (keys, values))
            output = _causal(queries, keys, values, scores.scaling, window, grouped)
        outputs.append(output)
    return _Take.apply(flat(outputs), packing)  # pyright: ignore[reportReturnType]


def _causal(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, grouped: bool) -> Tensor:
    """Compute causal attention, by default to all earlier places, or to the last `window`, all [count, heads, length, D]. A
    window gives each block of queries its keys.
    """
    if window is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
    length, block = q.shape[2], max(window, SMALLEST_BLOCK)
    masks: dict[tuple[int, int], Tensor] = {}  # shared, because every call keeps its mask for backward
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


ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
