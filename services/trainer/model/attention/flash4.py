"""FlashAttention 4 over sequences of any length, for Hopper GPUs, from the package `flash-attn-4`.

It takes about 0.6 of the time of version 2 on an H200 (docs/decisions, 007), and also computes capped scores, sinks, and
values of another size than keys. It compiles a kernel for some seconds when it first meets a size of heads or a kind of scores.
"""

from __future__ import annotations

import functools
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import structlog
import torch
from torch import Tensor

from services.trainer.model.attention.explicit import ScoreRule
from services.trainer.model.attention.flash2 import windows
from services.trainer.model.attention.packing import Packing

HOPPER = (9, 0)
"""Compute capability of the GPUs on which it was measured. It also has kernels for Blackwell."""

PACKAGE = "flash-attn-4"

SIZE_STEP = 32
"""Sizes of heads are multiples of it: with 80, gradients were wrong (version 4.0.0b36)."""

LARGEST_HEAD = 256

log = structlog.get_logger()


@functools.cache
def installed() -> str:
    """Return the version of the package for this process's GPU, or "" if there is none or it cannot be used."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER:
        return ""
    try:
        found = version(PACKAGE)
        _kernels()
    except PackageNotFoundError:
        return ""
    except Exception as error:  # it looks for libraries of NVIDIA's when it is imported
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        log.warning("FlashAttention 4 cannot be used; attention takes longer without it", package=PACKAGE, error=why)
        return ""
    return found


@functools.cache
def _kernels() -> Any:
    import flash_attn.cute.interface as kernels  # pyright: ignore[reportMissingImports]

    # About its own arguments, when it compiles.
    warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)
    return kernels


def computes(q: Tensor, k: Tensor, v: Tensor, scores: ScoreRule) -> bool:
    """Return whether it computes these heads, [T, heads, D or E], under these rules for scores. May be compiled.

    Values of another size than keys must be smaller, and not shared by heads: others have no backward pass on Hopper.
    """
    size, other = q.shape[-1], v.shape[-1]
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or size % SIZE_STEP or other % SIZE_STEP:
        return False
    return size <= LARGEST_HEAD and (size == other or (size > other and q.shape[1] == k.shape[1]))


def forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scores: ScoreRule) -> tuple[Tensor, Tensor]:
    """Compute attention over sequences, [T, heads, E], and its normalisers, [heads, T].

    q holds the sequences' own tokens, k and v all, last aligned with last.
    """
    out, lse, *_ = _kernels()._flash_attn_fwd(q, k, v, return_lse=True, **_given(packing, scores))
    return out, lse


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packing: Packing, scores: ScoreRule
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v as `forward` had them, and of the sinks if there are any."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return _kernels()._flash_attn_bwd(q, k, v, out, gradient, lse, deterministic=deterministic, **_given(packing, scores))


def _given(packing: Packing, scores: ScoreRule) -> dict[str, Any]:
    return {
        "cu_seqlens_q": packing.own,
        "cu_seqlens_k": packing.whole,
        "max_seqlen_q": packing.longest_own,
        "max_seqlen_k": packing.longest,
        "softmax_scale": scores.scaling,
        "softcap": scores.softcap or 0.0,
        "learnable_sink": scores.sinks,
        **(windows(scores) or {"causal": True}),
    }
