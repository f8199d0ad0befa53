"""An engine based on `transformers` for machines without vLLM: it samples from the received weights, one token at a time."""

from __future__ import annotations

from typing import Any

import torch

from services.config import RunConfig
from tests.support.scripted import ScriptedEngine


class TransformersEngine(ScriptedEngine):
    """The scripted engine, with completions sampled by the policy on the device."""

    async def start(self, config: RunConfig) -> None:
        """Load the model."""
        await super().start(config)
        from transformers import AutoModelForCausalLM

        self._device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        model: Any = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=getattr(torch, config.model.dtype))
        self._model, self._temperature = model.to(self._device).eval(), config.sampling.temperature

    async def receive(self, version: int) -> None:
        """Apply the weights that were received."""
        await super().receive(version)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                if name in self.weights:
                    parameter.copy_(self.weights[name].view(parameter.shape))

    @torch.no_grad()
    def script(self, prompt: list[int], seed: int, max_tokens: int) -> list[int]:
        """Sample a completion under a seed."""
        random = torch.Generator(self._device).manual_seed(seed)
        ids, cache, tokens = torch.tensor([prompt], device=self._device), None, list[int]()
        while len(tokens) < max_tokens:
            done = self._model(ids, past_key_values=cache, use_cache=True)
            chances = (done.logits[0, -1].float() / self._temperature).softmax(-1)
            tokens.append(int(torch.multinomial(chances, 1, generator=random)))
            ids, cache = torch.tensor([tokens[-1:]], device=self._device), done.past_key_values
        return tokens
