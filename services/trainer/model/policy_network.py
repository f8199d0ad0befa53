"""The policy's network: a Hugging Face causal language model that returns logprobs.

Guarantees: a model that packed training would compute incorrectly is refused on loading, with the reason: for reasons known by
name (support.py) and by trying it (proof.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from services.config.root import Model
from services.config.training import Lora, Trainer
from services.trainer.model import configuration, lora, support
from services.trainer.model.attention import NAME, packing
from services.trainer.model.attention.packing import RowTokens
from services.trainer.model.computing import compile_blocks, recompute
from services.trainer.model.configuration import logit_rule
from services.trainer.model.logprobs import LogprobHead
from services.trainer.model.proof import Proofs, blamed, prove
from services.trainer.model.sequence import Team

PLAIN = Trainer()
"""Keeps everything for backward and compiles nothing."""


class Scorer(nn.Module):
    """Holds `model` and scores one packed row per call; this is the module that DeepSpeed wraps."""

    def __init__(self, model: Any, temperature: float, chunk: int, team: Team | None = None) -> None:
        super().__init__()
        self.model = model
        self.temperature, self.chunk, self.team = temperature, chunk, team

    def forward(self, row: RowTokens) -> tuple[Tensor, Tensor]:
        """Return the logprob of each target and the entropy of its distribution, two [R] float32.

        With a team, both cover the whole row on every rank of the team, and the call is collective.
        """
        if self.team is None:
            return self._score(row)
        part = self.team.cut(row)
        logprobs, entropy = self._score(part)
        return self.team.join(logprobs, part), self.team.join(entropy, part)

    def _score(self, row: RowTokens) -> tuple[Tensor, Tensor]:
        packing.row.packing = row.packing
        states = support.backbone(self.model)(
            input_ids=row.input_ids[None], position_ids=row.positions[None], packing=row.packing, use_cache=False
        ).last_hidden_state[0]
        return self.model.get_output_embeddings()(states[row.predictors], row.targets, self.temperature, self.chunk)


def load(
    config: Model,
    temperature: float,
    chunk: int,
    trainer: Trainer = PLAIN,
    team: Team | None = None,
    adapters: Lora | None = None,
    proofs: Proofs | None = None,
    device: torch.device | None = None,
) -> Scorer:
    """Load `model.path` in `model.dtype` on the CPU, ready for packed rows: without dropout, with adapters if configured.

    With `proofs` the model is proven first, on `device` if it fits there. Raises `UnsupportedModel`.
    """
    model = _read(config)
    support.check(model, config.path, config.max_tokens, team is not None)
    _silence(model)
    recompute(model, trainer)
    keeps_logits = trainer.compile and not trainer.gradient_checkpointing  # for backward: speed is wanted, nothing recomputed
    head = LogprobHead(model.get_output_embeddings(), config.fp32_head, logit_rule(model.config), keeps_logits)

    def attach() -> Scorer:
        model.set_output_embeddings(head)
        return Scorer(model, 1.0, chunk)

    def compile_model() -> None:
        head.compiled = True
        compile_blocks(model)

    if proofs is None:
        attach()
    else:
        settings = config.dtype, config.fp32_head, *("compiled",) * trainer.compile
        compilation = compile_model if trainer.compile else None
        prove(model, config.path, attach, compilation, settings, proofs, device or torch.device("cpu"))
    model.set_attn_implementation(NAME if team is None else team.register(model.config.get_text_config()))
    if adapters is not None and adapters.rank:
        support.check_adapters(model, adapters, config.path)
        lora.attach(model, adapters, config.path)
    if trainer.compile:
        compile_model()
    return Scorer(model, temperature, chunk, team)


def _read(config: Model) -> Any:
    with blamed(f"model.path = {config.path!r} cannot be loaded as a causal language model for packed rows, use another"):
        return AutoModelForCausalLM.from_pretrained(
            config.path,
            config=configuration.read(config.path, config.max_tokens),
            dtype=getattr(torch, config.dtype),
            attn_implementation=NAME,
        )


def _silence(model: nn.Module) -> None:
    """Set dropout to 0 in modules that have a rate of their own; the configuration's are 0 already."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if configuration.NOISE.search(name) and isinstance(value, float) and value:
                setattr(module, name, 0.0)
