"""The policy's network: a Hugging Face causal language model that returns logprobs.

Guarantees: a model that packed training would compute incorrectly is rejected on loading, with the reason.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from services.config.root import Model
from services.config.training import Lora
from services.trainer.model import lora
from services.trainer.model.attention import NAME, Packing, UnsupportedModel
from services.trainer.model.logprobs import LogprobHead
from services.trainer.model.sequence import Team

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
"""Layer types that our attention function supports. Recurrent layers would carry state from one response into the next."""

LOGIT_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Configuration keys of models that change logits after the output matrix."""


class Scorer(nn.Module):
    """Holds `model` and scores one packed row per call; this is the module that DeepSpeed wraps."""

    def __init__(self, model: Any, temperature: float, chunk: int, team: Team | None = None) -> None:
        super().__init__()
        self.model = model
        self.temperature, self.chunk, self.team = temperature, chunk, team

    def forward(
        self, input_ids: Tensor, positions: Tensor, packing: Packing, predictors: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the logprob of each target and the entropy of its distribution, two [R] float32; arguments as in
        `batches.PackedRow`.

        With a team, both cover the whole row on every rank of the team, and the call is collective.
        """
        if self.team is None:
            return self._score(input_ids, positions, packing, predictors, targets)
        part = self.team.cut(input_ids, positions, packing, predictors, targets)
        logprobs, entropy = self._score(part.input_ids, part.positions, part.packing, part.predictors, part.targets)
        return self.team.join(logprobs, part), self.team.join(entropy, part)

    def _score(
        self, input_ids: Tensor, positions: Tensor, packing: Packing, predictors: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        states = self.model.base_model(
            input_ids=input_ids[None], position_ids=positions[None], packing=packing, use_cache=False
        ).last_hidden_state[0]
        return self.model.lm_head(states[predictors], targets, self.temperature, self.chunk)


def load(
    config: Model,
    temperature: float,
    chunk: int,
    gradient_checkpointing: bool,
    team: Team | None = None,
    adapters: Lora | None = None,
) -> Scorer:
    """Load `model.path` in `model.dtype` on the CPU, ready for packed rows: without dropout, with adapters if configured."""
    try:
        attention = NAME if team is None else team.register(AutoConfig.from_pretrained(config.path).get_text_config())
        model: Any = AutoModelForCausalLM.from_pretrained(
            config.path, dtype=getattr(torch, config.dtype), attn_implementation=attention
        )
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"model.path = {config.path!r} cannot be loaded as a causal language model: {error}") from error
    _check(model, config.path)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif getattr(module, "attention_dropout", None):
            module.attention_dropout = 0.0
    if adapters is not None and adapters.rank:
        lora.attach(model, adapters, config.path)
    model.lm_head = LogprobHead(model.lm_head, config.fp32_head)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return Scorer(model, temperature, chunk, team)


def _check(model: Any, path: str) -> None:
    config, name = model.config, f"model.path = {path!r} ({type(model).__name__})"
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{name} does not use transformers' attention registry")
    others = set(getattr(config, "layer_types", None) or ()) - SUPPORTED_LAYERS
    if others:
        raise UnsupportedModel(f"{name} has layers of type {sorted(others)}; supported: {sorted(SUPPORTED_LAYERS)}")
    for key in LOGIT_SCALES:
        if getattr(config, key, None) not in (None, 1, 1.0):
            raise UnsupportedModel(f"{name} sets {key}, which packed logprobs do not apply")
    if not isinstance(getattr(model, "lm_head", None), nn.Linear) or model.lm_head.bias is not None:
        raise UnsupportedModel(f"{name} has no bias-free linear output layer `lm_head`")
