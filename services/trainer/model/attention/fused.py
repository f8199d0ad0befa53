"""Causal attention over a packed row by fused kernels for GPUs, as one operator of eager and of compiled layers.

Guarantees: a layer's compiled code is not split at it, and does not depend on the lengths of a row's sequences. For the backward
pass it keeps the normalisers of the softmax, [heads, T] float32, in addition to its inputs and output.

Kernels compute sequences of any length one after the other, and read queries where they are. Keys and values of a prompt that
several sequences share are copied to each: reading them in place, in a second pass merged by the normalisers, takes longer.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from services.trainer.model.attention import flash2, flash4
from services.trainer.model.attention.explicit import ScoreRule
from services.trainer.model.attention.packing import Packing, gathered, row

AMPERE = (8, 0)

WHOLE, UNCAPPED = 0, 0.0
"""The window and the cap of a layer that has none."""


class Kernels(Protocol):
    """A module with kernels: flash4, flash2."""

    def computes(self, q: Tensor, k: Tensor, v: Tensor, scores: ScoreRule, /) -> bool: ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scores: ScoreRule, /) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packing: Packing, scores: ScoreRule, /
    ) -> tuple[Tensor, ...]: ...


@functools.cache  # the question takes as long as launching a kernel, and is asked for every layer
def available() -> tuple[Kernels, ...]:
    """Return the kernels for this process's GPU, the fastest first."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < AMPERE:
        return ()
    return (flash4, flash2) if flash4.installed() else (flash2,)


def kernels_of(given: tuple[Kernels, ...], q: Tensor, k: Tensor, v: Tensor, scores: ScoreRule) -> Kernels | None:
    """Return the first of the kernels that computes these heads under these rules for scores. May be compiled."""
    for kernels in given:
        if kernels.computes(q, k, v, scores):
            return kernels
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, scores: ScoreRule) -> Tensor:
    """Compute the attention of the current row, [T, heads, E]: q [T, heads, D], k [T, kv heads, D], v [T, kv heads, E].

    Its backward pass must precede the forward pass of another row.
    """
    window, softcap = scores.window or WHOLE, scores.softcap or UNCAPPED
    return torch.ops.grpo.packed_attention(q, k, v, scores.sinks, scores.scaling, window, softcap)[0]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scaling: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    packing, scores = _packing(q), ScoreRule(scaling, window or None, softcap or None, sinks)
    q, k, v = (states.contiguous() for states in (q, k, v))
    return _chosen(q, k, v, scores).forward(q, *_whole(k, v, packing), packing, scores)


def _backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scaling: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    packing, scores = _packing(q), ScoreRule(scaling, window or None, softcap or None, sinks)
    gradient, q, k, v = (states.contiguous() for states in (gradient, q, k, v))
    kernels = _chosen(q, k, v, scores)
    for_q, for_k, for_v, *others = kernels.backward(gradient, q, *_whole(k, v, packing), out, lse, packing, scores)
    if packing.shares:
        for_k, for_v = (gathered(each, packing.originals, packing.shared.copies, packing.shared) for each in (for_k, for_v))
    return for_q, for_k, for_v, others[0] if others else q.new_empty(0)


def _packing(q: Tensor) -> Packing:
    packing = row.packing
    if packing is None or len(packing.owned) != len(q):
        raise RuntimeError(f"attention over {len(q)} tokens, which are not those of the current row")
    return packing


def _chosen(q: Tensor, k: Tensor, v: Tensor, scores: ScoreRule) -> Kernels:
    kernels = kernels_of(available(), q, k, v, scores)
    assert kernels is not None, "attend() is for heads and scores that kernels compute"
    return kernels


def _whole(k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """Return the keys and values of whole sequences."""
    if not packing.shares:
        return k, v
    return k.index_select(0, packing.sequences), v.index_select(0, packing.sequences)


_operator = torch.library.custom_op(
    "grpo::packed_attention",
    _forward,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? sinks, float scaling, int window, float softcap) -> (Tensor, Tensor)",
)
_gradient = torch.library.custom_op(
    "grpo::packed_attention_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, Tensor lse, float scaling, int window, "
    "float softcap) -> (Tensor, Tensor, Tensor, Tensor)",
)


@_operator.register_fake
def _shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _size = q.shape  # len(q) would fix the number of tokens, and every row of another length would be compiled for
    return q.new_empty(tokens, heads, v.shape[2]), q.new_empty(heads, tokens, dtype=torch.float32)


@_gradient.register_fake
def _gradient_shapes(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    states = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (q, k, v))
    return (*states, q.new_empty(0) if sinks is None else torch.empty_like(sinks))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, *ctx.rule = inputs
    ctx.save_for_backward(q, k, v, sinks, *output)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: recomputed layers compute theirs when they are read
    found = torch.ops.grpo.packed_attention_backward(gradient, *saved, *ctx.rule)
    return (*found[:3], None if saved[3] is None else found[3], None, None, None)


_operator.register_autograd(_differentiate, setup_context=_keep)
