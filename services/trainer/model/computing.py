"""How the network's passes are computed: what backward recomputes, what is compiled, and which kernel computes attention.

Guarantees: none of it changes results beyond rounding. Compilation is off unless the configuration asks for it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from services.config.training import Trainer
from services.trainer.model.attention import NAME, fused, packed_attention
from services.trainer.model.attention.explicit import ScoreRule

KEPT = {
    *("aten::mm", "aten::addmm", "aten::bmm", "grpo::packed_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    *(f"aten::_scaled_dot_product_{kernel}_attention" for kernel in ("flash", "efficient", "cudnn")),
}
"""Operations whose results selective checkpointing keeps: products of matrices and attention, which take nearly all the time."""


def recompute(model: Any, wanted: Trainer) -> None:
    """Make the backward pass recompute everything that is not kept."""
    if wanted.gradient_checkpointing:
        given: dict[str, Any] = {"use_reentrant": False}
        if wanted.gradient_checkpointing == "selective":
            given["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep)
        model.gradient_checkpointing_enable(given)


def compile_blocks(model: nn.Module) -> None:
    """Compile each decoder block on its first call, for rows of any length. Attention stays as it is.

    Decoder blocks are the layers that transformers can recompute in backward. They have the same code, which is compiled once.
    """
    import torch._inductor.config as inductor

    # With heads of a size that is no multiple of 64, padded intermediate results reached the operator of attention in another
    # layout than the one they were written in (PyTorch 2.11).
    inductor.comprehensive_padding = False
    kernels = fused.available()
    ALL_ATTENTION_FUNCTIONS.register(NAME, functools.partial(_traced_attention, kernels) if kernels else _eager_attention)
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile(dynamic=True)


def _traced_attention(
    kernels: tuple[fused.Kernels, ...],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Compute `packed_attention` within a compiled block: as one operator if one of the kernels computes it. Otherwise the block
    is split there, and every part costs the host as much time as launching its kernels.
    """
    if attention_mask is None and not given.get("dropout"):
        q, k, v = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
        scaling = given.get("scaling")
        scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
        scores = ScoreRule(scaling, given.get("sliding_window"), given.get("softcap"), given.get("s_aux"))
        if fused.kernels_of(kernels, q, k, v, scores):
            return fused.attend(q, k, v, scores)[None], None
    return _eager_attention(module, query, key, value, attention_mask, **given)


_eager_attention: Any = torch.compiler.disable(packed_attention)


def _keep(_: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation.name().split(".")[0] in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
