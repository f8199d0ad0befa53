"""A tiny random Qwen3 with its tokenizer, groups of random completions, and plans over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.protocol.config import RunConfig
from services.protocol.messages import Payload, RankPlan, Sample, StepPlan

VOCABULARY = 96


def make_model(folder: Path, tied: bool = False) -> Path:
    """Two layers, four heads on two key/value heads of 32: grouped queries, as in real Qwen3 models."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token="t1").save_pretrained(folder)
    return folder


def make_config(model: Path, /, **sections: Mapping[str, Any]) -> RunConfig:
    """A float32 run on `model`; keyword arguments are laid over its sections."""
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "dtype": "float32", "max_tokens": 256},
        "data": {"source": {"kind": "jsonl", "path": "unused.jsonl"}, "max_prompt_tokens": 32},
        "sampling": {"temperature": 0.7, "max_tokens": 32},
        "trainer": {"row_tokens": 128, "logprob_chunk_tokens": 5, "step_timeout_s": 60.0},
        "loss": {"kl_beta": 0.1},
        "optimizer": {"learning_rate": 1e-3},
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | dict(values)
    return RunConfig.model_validate(tree | {"verifiers": [{"kind": "math"}]})


def make_payloads(groups: int, size: int, seed: int = 0) -> dict[str, Payload]:
    """Groups of `size` random completions of 1 to 20 tokens, with behaviour logprobs around those of a uniform policy."""
    random = np.random.default_rng(seed)
    payloads = {}
    for group in range(groups):
        lengths = random.integers(1, 21, size).astype(np.int32)
        count = int(lengths.sum())
        payloads[f"0-{group}.1"] = Payload(
            prompt=random.integers(0, VOCABULARY, random.integers(1, 9)).astype(np.int32),
            lengths=lengths,
            tokens=random.integers(0, VOCABULARY, count).astype(np.int32),
            logprobs=random.normal(-4.5, 1.5, count).astype(np.float32),
            spans=np.zeros((0, 4), np.int32),
        )
    return payloads


def make_samples(payloads: Mapping[str, Payload], masked: Sequence[int] = ()) -> list[Sample]:
    """Every completion with an advantage of its own; those numbered in `masked` are not trained."""
    samples = []
    for name, payload in payloads.items():
        for index, length in enumerate(payload.lengths):
            number = len(samples)
            trained = 0 if number in masked else int(length)
            samples.append(Sample(name, index, float(np.float32((-1) ** number * (0.3 + 0.2 * number))), trained))
    return samples


def plan_of(
    layout: Sequence[Sequence[Sequence[Sequence[int]]]], samples: Sequence[Sample], step: int = 0
) -> tuple[StepPlan, list[RankPlan]]:
    """Plans from numbers of samples, `layout[mini_batch][rank][row]`; short ranks get empty rows."""
    rows_of: list[list[list[Sample]]] = [[] for _ in layout[0]]
    sizes, denominators = [], []
    for mini_batch in layout:
        sizes.append(max(len(rows) for rows in mini_batch))
        denominators.append(float(sum(samples[i].trained_tokens for rows in mini_batch for row in rows for i in row)))
        for rank, rows in enumerate(mini_batch):
            rows_of[rank] += [[samples[i] for i in row] for row in rows] + [[]] * (sizes[-1] - len(rows))
    plan = StepPlan(
        step=step,
        groups=[],
        fresh_groups=[],
        ranks=len(rows_of),
        rows_per_rank=sum(sizes),
        mini_batch_rows=sizes,
        denominators=denominators,
        response_tokens=int(sum(denominators)),
        total_tokens=0,
        stats={},
    )
    return plan, [RankPlan(rows) for rows in rows_of]
