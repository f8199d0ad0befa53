"""The parts of benchmarks/weights with a real vLLM: pauses, and tokens after an update."""

from __future__ import annotations

import time
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from services.config.load import validate
from services.generator.engines.vllm import VllmEngine
from services.groups.generated import SamplingParameters
from services.protocol.messages import Round
from tests.support.models.tiny_vllm import reference_logprobs
from tests.support.senders import sender_of

SEQUENCES, PAUSES = 64, 6
SAMPLED, EQUAL = 1000, 2e-5  # versions; nats between logprobs that count as equal
SMALL = {
    "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
"""Sizes of a model of 1.6 MB."""


def make_model(folder: Path, **changed: int) -> Any:
    """Save and return a Qwen3 with random weights, 56 million of them unless sizes are changed."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 512, "tie_word_embeddings": True,
        "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    model = Qwen3ForCausalLM(Qwen3Config(**{**sizes, **changed}))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    words = {f"t{i}": i for i in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t1", pad_token="t0", unk_token="t2")
    fast.save_pretrained(folder)
    return model


def make_config(folder: Path, dtype: str = "bfloat16", tokens: int = 512, **sections: dict[str, Any]) -> Any:
    """Return a run's configuration for the model in `folder`, where its versions go too; `sections` replace its sections."""
    tree: dict[str, Any] = {
        "model": {"path": str(folder), "dtype": dtype, "max_tokens": tokens},
        "data": {"sources": [{"kind": "jsonl", "path": "prompts.jsonl"}], "max_prompt_tokens": tokens - 64},
        "verifiers": [{"kind": "exact"}],
        "sampling": {"max_tokens": 64},
        "sync": {"backend": "store", "folder": str(folder / "volume")},
    }
    return validate(tree | sections, origin="benchmark")


def distinct(model: Any) -> list[torch.Tensor]:
    """Return the model's parameters, tied ones once."""
    return list({id(weight): weight for weight in model.parameters()}.values())


class Served:
    """A vLLM engine, and a trainer's model that it follows through a version store."""

    def __init__(self, folder: Path, dtype: str, tokens: int, sizes: Mapping[str, int]) -> None:
        """`sizes` override those of `make_model`."""
        self.model = make_model(folder, max_position_embeddings=tokens, **sizes).to(getattr(torch, dtype))
        self.nbytes = sum(weight.numel() * weight.element_size() for weight in distinct(self.model))
        self.config = make_config(
            folder,
            dtype,
            tokens,
            generator={"max_num_seqs": SEQUENCES, "engine_options": {"kv_cache_memory_bytes": 1 << 30}},
            sync={"backend": "store", "folder": str(folder / "volume")},
        )
        self.sender = sender_of(self.config, self.model)
        self.engine, self.version = VllmEngine(), -1

    async def update(self) -> float:
        """Publish a version in which a fiftieth of the weights differ, stage and apply it; return the seconds of the pause."""
        with torch.no_grad():
            for weight in distinct(self.model):
                weight *= torch.where(torch.rand(weight.shape) < 0.02, 1.01, 1.0).to(weight.dtype)
        self.version += 1
        host, _ = self.sender.open(1)
        self.sender.send(self.version, 1)
        await self.engine.join(Round(0, self.version, "join", {}, 0, "store", host, 0, 0, 1), 1)
        await self.engine.stage(self.version)
        began = time.perf_counter()
        await self.engine.pause()
        await self.engine.receive(self.version)
        await self.engine.resume()
        return time.perf_counter() - began


async def pause(folder: Path, samples: dict[str, list[float]]) -> None:
    """Measure the pauses of an engine with 113 MB of weights."""
    served = Served(folder, "bfloat16", 512, {})
    await served.engine.start(served.config)
    try:
        await served.update()  # the first one is an anchor, and allocates memory
        for _ in range(PAUSES):
            took_s = await served.update()
            samples.setdefault("pause_s", []).append(took_s)
            samples.setdefault("pause_s_per_gb", []).append(took_s / served.nbytes * 1e9)
    finally:
        await served.engine.close()


async def sampled(folder: Path, samples: dict[str, list[float]]) -> None:
    """Measure the share of versions whose completions have the logprobs that `transformers` computes from the trainer's weights.

    Also measure the share for which the previous weights give other logprobs: only those prove anything.
    """
    served = Served(folder, "float32", 512, SMALL)
    await served.engine.start(served.config)
    equal, told_apart, began = 0, 0, time.perf_counter()
    prompt = torch.randint(3, 1024, (32,)).tolist()
    try:
        for version in range(SAMPLED):
            before = deepcopy(served.model)
            await served.update()
            made = await served.engine.generate(f"probe-{version}", prompt, version, SamplingParameters(8))
            now, last = (reference_logprobs(model, prompt, made.tokens) for model in (served.model, before))
            equal += float(abs(made.logprobs - now).max()) <= EQUAL
            told_apart += float(abs(last - now).max()) > 2 * EQUAL
    finally:
        await served.engine.close()
    samples["versions_sampled"] = [equal / SAMPLED]
    samples["versions_told_apart"] = [told_apart / SAMPLED]
    samples["sampled_s"] = [time.perf_counter() - began]
