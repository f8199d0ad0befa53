"""A tiny random Qwen3 with a tokenizer, and the logprobs that `transformers` gives its completions."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np

from services.config import RunConfig
from services.config.load import validate
from services.generator.engines.base import Engine
from services.groups.generated import Generated

VOCABULARY = 1024
EOS = 1
BUCKET_BYTES = 1 << 20
"""The model is sent in two buckets of this size."""


def make_model(folder: Path, tied: bool, seed: int = 0, bias: bool = False) -> Any:
    """Save a float32 Qwen3 of about 1.6 MiB in `folder` and return it. `bias`: a Qwen2 instead, whose attention has biases."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    kinds: tuple[Any, Any] = (Qwen2ForCausalLM, Qwen2Config) if bias else (Qwen3ForCausalLM, Qwen3Config)
    model = kinds[0](
        kinds[1](
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=tied,
            eos_token_id=EOS,
            bos_token_id=None,
            pad_token_id=0,
            initializer_range=0.1,
        )
    ).eval()
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"t{EOS}", pad_token="t0", unk_token="t2")
    fast.save_pretrained(folder)
    return model


def make_config(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    """Return a configuration with the model in `folder`, overlaid by `sections`; its logprobs can be compared token by token."""
    tree: dict[str, Any] = {
        "model": {"path": str(folder), "dtype": "float32", "max_tokens": 256},
        "data": {"sources": [{"kind": "jsonl", "path": "prompts.jsonl"}], "max_prompt_tokens": 64},
        "verifiers": [{"kind": "exact"}],
        "sampling": {"max_tokens": 192},
        "generator": {"max_num_seqs": 32},
        "sync": {"host": "127.0.0.1", "deadline_s": 20.0},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return validate(tree, origin="test")


def reference_logprobs(model: Any, prompt: list[int], tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return the logprobs of `tokens` after `prompt`, [T] float32, computed by `transformers` in one forward pass."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens.tolist()])).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
        return logprobs.gather(1, torch.tensor(tokens.astype(np.int64))[:, None])[:, 0].numpy()


def assert_greedy(model: Any, prompt: list[int], tokens: np.ndarray, slack: float = 1e-4) -> None:
    """Check that every token is the model's most likely one, up to ties of `slack` in logits."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens.tolist()])).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(tokens.astype(np.int64))[:, None])[:, 0]
    assert (logits.max(dim=1).values - chosen).max() <= slack


def perturb(model: Any, seed: int, share: float = 1.0) -> None:
    """Change every weight, or a share of them."""
    import torch

    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            change = torch.randn_like(weight) * 0.05
            weight.add_(change if share == 1.0 else change * (torch.rand_like(weight) < share))


async def until(engine: Engine, request_id: str, tokens: int) -> Generated:
    """Wait until a running completion has `tokens` tokens."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = engine.snapshot([request_id]).get(request_id)
        if found is not None and len(found.tokens) >= tokens:
            return found
        await asyncio.sleep(0.001)
    raise AssertionError(f"{request_id} did not reach {tokens} tokens")
