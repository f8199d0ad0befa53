"""The tiny Qwen3: its shape, and sampling from it without an engine.

Guarantees: transformers and vLLM can load the folder that `save_model` fills.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from examples.arithmetic.tokenizer import END_ID, PAD_ID


def make_model(vocabulary: int, longest: int, layers: int = 4) -> Qwen3ForCausalLM:
    """Return a float32 model, of 0.87 M parameters if it has four layers; `longest` is its context in tokens."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,  # the smallest for which vLLM has a CPU kernel
            max_position_embeddings=longest,
            tie_word_embeddings=False,
            pad_token_id=PAD_ID,
            eos_token_id=END_ID,
            bos_token_id=None,
            initializer_range=0.06,  # 128 ** -0.5 = 0.09; with the usual 0.02 it learned half as fast at this width
        )
    )


def save_model(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors."""
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, pad_token_id=PAD_ID, eos_token_id=END_ID)
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # created for its owner only, but a generator may be another user


@torch.no_grad()
def complete(
    model: Qwen3ForCausalLM, prompts: Sequence[Sequence[int]], max_tokens: int, generator: torch.Generator | None
) -> list[list[int]]:
    """Return completions as token ids without the end token; sampled at temperature 1 with `generator`, else greedy."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    completions: list[list[int]] = [[] for _ in prompts]
    for indices in by_length.values():
        rows = _complete_equally_long(model, torch.tensor([list(prompts[i]) for i in indices]), max_tokens, generator)
        for index, row in zip(indices, rows, strict=True):
            completions[index] = row[: row.index(END_ID)] if END_ID in row else row
    return completions


def _complete_equally_long(
    model: Qwen3ForCausalLM, tokens: torch.Tensor, max_tokens: int, generator: torch.Generator | None
) -> list[list[int]]:
    """Complete `tokens` [B, P], prompts of equal length that need no attention mask, with up to `max_tokens` ids each."""
    ended = torch.zeros(len(tokens), dtype=torch.bool)
    cache, made = None, []
    for _ in range(max_tokens):
        output = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = output.past_key_values, output.logits[:, -1]  # [B, V]
        if generator is None:
            tokens = logits.argmax(dim=-1, keepdim=True)
        else:
            tokens = torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator)
        made.append(tokens)
        ended |= tokens[:, 0] == END_ID
        if ended.all():
            break
    return torch.cat(made, dim=1).tolist()
