"""Causal attention over a packed row by PyTorch's fused kernels for GPUs, as one operator of eager and of compiled layers.

Guarantees: a layer's compiled code is not split at it, and does not depend on the lengths of a row's sequences. For the backward
pass it keeps the normalisers of the softmax, [heads, T] float32, in addition to its inputs and output.

Two kernels compute it: FlashAttention's for sequences of any length, which reads queries where they are; and cuDNN's, which takes
batches of equal length, plans every new shape of these for a third of a second, and is then faster on Hopper GPUs if
little of them is padding. FlashAttention 3 or 4 takes the place of 2 after `torch.nn.attention.activate_flash_attention_impl`.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor

from services.trainer.model.attention.current_row import row
from services.trainer.model.attention.explicit import ScoreRule
from services.trainer.model.attention.packing import Packing, flat, gathered

AMPERE, HOPPER = (8, 0), (9, 0)

PLANS = "TORCH_CUDNN_SDPA_AVOID_RECOMPILE"
"""Makes cuDNN use one plan for any length, and lay out normalisers in another way than the backward pass here expects."""

FLASH_HEAD = 256
"""Largest head that FlashAttention 2 computes."""

DENSE_HEAD = 128
"""Largest head for which cuDNN's kernel was measured."""

DENSE_WORK = 1.3
"""How many times the work of FlashAttention's kernel cuDNN's does in the same time: 1.4 on an H200, for both passes and with what
laying tokens out takes. At 1.12 times the work it takes 0.78 of the time, at 1.46 times 1.03 (docs/log.md, 2026-11-27).
"""

NO_WEIGHT = 1e30
"""Normaliser of a query that gives no key any weight."""

WHOLE = 0
"""The window of a layer that has none."""


@functools.cache  # the question takes as long as launching a kernel, and is asked for every layer
def available() -> bool:
    """Return whether this process's GPU has the kernels."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= AMPERE


def fits(q: Tensor, k: Tensor, v: Tensor, scores: ScoreRule) -> bool:
    """Return whether the kernels compute these heads, [T, heads, D] each, under these rules for scores. May be compiled."""
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or scores.softcap is not None or scores.sinks is not None:
        return False
    size = q.shape[-1]
    return size == k.shape[-1] == v.shape[-1] <= FLASH_HEAD and size % 8 == 0


def attend(q: Tensor, k: Tensor, v: Tensor, scores: ScoreRule) -> Tensor:
    """Compute the attention of the current row, [T, heads, D]: q [T, heads, D], k and v [T, kv heads, D].

    Its backward pass must precede the forward pass of another row.
    """
    return torch.ops.grpo.packed_attention(q, k, v, scores.scaling, scores.window or WHOLE)[0]


def _dense(q: Tensor, packing: Packing, window: int) -> bool:
    """Return whether cuDNN computes a row."""
    if not row.planned and (not row.recurs or packing.padded_work > DENSE_WORK * packing.work):
        return False
    if window != WHOLE or q.shape[-1] > DENSE_HEAD or any(length == 1 for _, length in packing.shapes):
        return False
    return plans()


def plans() -> bool:
    """Return whether cuDNN may compute rows whose shape recurs: on the GPUs where this was measured."""
    if torch.are_deterministic_algorithms_enabled() or not torch.backends.cuda.cudnn_sdp_enabled() or PLANS in os.environ:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER


def _packing(q: Tensor) -> Packing:
    packing = row.packing
    if packing is None or len(packing.owned) != len(q):
        raise RuntimeError(f"attention over {len(q)} tokens, which are not those of the current row")
    return packing


def _forward(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int) -> tuple[Tensor, Tensor]:
    packing = _packing(q)
    q, k, v = (states.contiguous() for states in (q, k, v))
    if _dense(q, packing, window):
        return _dense_forward(q, k, v, packing, scaling)
    if packing.shares:
        k, v = (states.index_select(0, packing.sequences) for states in (k, v))
    return flash_forward(q, k, v, packing, scaling, window)


def _backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scaling: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    packing = _packing(q)
    gradient, q, k, v = (states.contiguous() for states in (gradient, q, k, v))
    if _dense(q, packing, window):
        return _dense_backward(gradient, q, k, v, out, lse, packing, scaling)
    if not packing.shares:
        return flash_backward(gradient, q, k, v, out, lse, packing, scaling, window)
    k, v = (states.index_select(0, packing.sequences) for states in (k, v))
    for_q, *others = flash_backward(gradient, q, k, v, out, lse, packing, scaling, window)
    for_k, for_v = (gathered(each, packing.originals, packing.shared.copies, packing.shared) for each in others)
    return for_q, for_k, for_v


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float, window: int
) -> tuple[Tensor, Tensor]:  # [T, heads, D], [heads, T]
    """Compute attention over sequences, of which q holds the own tokens and k and v all, last aligned with last."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, packing.own, packing.whole, packing.longest_own, packing.longest, 0.0, True, False,
        scale=scaling, **_windows(window),
    )  # fmt: skip
    return out, lse


def flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packing: Packing, scaling: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v as `flash_forward` had them."""
    random, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0)  # there is no dropout
    return torch.ops.aten._flash_attention_backward(
        gradient, q, k, v, out, lse, packing.own, packing.whole, packing.longest_own, packing.longest, 0.0, True, random, unused,
        scale=scaling, **_windows(window),
    )  # fmt: skip


def _windows(window: int) -> dict[str, int]:
    return {} if window == WHOLE else {"window_size_left": window - 1, "window_size_right": 0}


def _dense_forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float) -> tuple[Tensor, Tensor]:
    laid = [packing.batches(states.index_select(0, packing.filled)) for states in (q, k, v)]
    batches = [cudnn_forward(q, k, v, scaling) for q, k, v in zip(*laid, strict=True)]
    out, lse = (flat(each).index_select(0, packing.owned) for each in zip(*batches, strict=True))
    return out, lse[..., 0].T.contiguous()


def _dense_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packing: Packing, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Lay everything out again, which takes less than keeping it would need memory."""
    laid = [states.index_select(0, packing.filled) for states in (q, k, v, out)]
    for states, other in ((gradient, 0.0), (lse.T[..., None], NO_WEIGHT)):  # of queries that this place does not own
        extended = torch.cat((states, states.new_full((1, *states.shape[1:]), other)))
        laid.append(extended.index_select(0, packing.sources))
    batches = zip(*map(packing.batches, laid), strict=True)
    found = [cudnn_backward(g, q, k, v, out, lse, scaling) for q, k, v, out, g, lse in batches]
    for_q, *others = (flat(each) for each in zip(*found, strict=True))
    for_k, for_v = (gathered(each, packing.owned, packing.shared.slots, packing.shared) for each in others)
    return for_q.index_select(0, packing.owned), for_k, for_v


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Compute causal attention of a batch, [count, heads, length, D], and its normalisers, [count, heads, length, 1]."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=scaling)
    return out, lse.view(*out.shape[:3], 1)


def cudnn_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of a batch."""
    random = torch.zeros((), dtype=torch.int64, device=q.device)  # there is no dropout
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        gradient, q, k, v, out, lse.contiguous(), random, random, None, None, None, q.shape[2], k.shape[2], 0.0, True,
        scale=scaling,
    )  # fmt: skip


_operator = torch.library.custom_op(
    "grpo::packed_attention", _forward, mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, float scaling, int window) -> (Tensor, Tensor)",
)  # fmt: skip
_gradient = torch.library.custom_op(
    "grpo::packed_attention_backward", _backward, mutates_args=(),
    schema="(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float scaling, int window) "
    "-> (Tensor, Tensor, Tensor)",
)  # fmt: skip


@_operator.register_fake
def _shapes(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[1], len(q), dtype=torch.float32)


@_gradient.register_fake
def _gradient_shapes(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    for_q, for_k, for_v = (torch.empty_like(states, memory_format=torch.contiguous_format) for states in (q, k, v))
    return for_q, for_k, for_v


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *states, ctx.scaling, ctx.window = inputs
    ctx.save_for_backward(*states, *output)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return (*torch.ops.grpo.packed_attention_backward(gradient, *ctx.saved_tensors, ctx.scaling, ctx.window), None, None)


_operator.register_autograd(_differentiate, setup_context=_keep)
