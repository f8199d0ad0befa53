"""A tiny random Qwen3 with its tokenizer, groups of random completions, and plans over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.config import RunConfig
from services.config.load import validate
from services.config.loss import Loss
from services.protocol.messages import RankPlan, Sample, StepPlan
from services.protocol.payloads import Payload

VOCABULARY = 96
CONSTANT = 64
"""Divisor of a group with the denominator `constant`."""


def make_model(folder: Path, tied: bool = False) -> Path:
    """Save a two-layer model with grouped queries, as real Qwen3 models have: four heads share two key/value heads."""
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


def make_config(model: Path, /, **sections: Mapping[str, Any] | list[Any]) -> RunConfig:
    """Return the configuration of a float32 run on `model`; keyword arguments override its sections."""
    tree: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32", "max_tokens": 256},
        "data": {"sources": [{"kind": "jsonl", "path": "unused.jsonl"}], "max_prompt_tokens": 32},
        "sampling": {"temperature": 0.7, "max_tokens": 32},
        "trainer": {"row_tokens": 128},
        "loss": {"kl_beta": 0.1},
        "optimizer": {"learning_rate": 1e-3},
    }
    for name, values in sections.items():
        tree[name] = values if isinstance(values, list) else tree.get(name, {}) | dict(values)
    return validate(tree | {"verifiers": [{"kind": "math"}]}, origin="test")


def make_payloads(groups: int, size: int, seed: int = 0) -> dict[str, Payload]:
    """Return groups of `size` random completions of 1 to 20 tokens, with behaviour logprobs near a uniform policy's."""
    random = np.random.default_rng(seed)
    payloads = {}
    for group in range(groups):
        lengths = random.integers(1, 21, size).astype(np.int32)
        count = int(lengths.sum())
        payloads[f"0-{group}.1"] = Payload(
            prompt=random.integers(0, VOCABULARY, random.integers(1, 9)).astype(np.int32),
            lengths=lengths,
            tokens=random.integers(0, VOCABULARY, count).astype(np.int32),
            logprobs=np.minimum(random.normal(-4.5, 1.5, count), 0).astype(np.float32),
            spans=np.zeros((0, 4), np.int32),
        )
    return payloads


def make_samples(payloads: Mapping[str, Payload], masked: Sequence[int] = (), weights: Sequence[float] = ()) -> list[Sample]:
    """Give every completion a distinct advantage. Those numbered in `masked` are not trained on; `weights` are per group."""
    samples = []
    for group, (name, payload) in enumerate(payloads.items()):
        for index, length in enumerate(payload.lengths):
            number, tools = len(samples), payload.tool_spans[payload.tool_spans[:, 0] == index]
            trained = 0 if number in masked else int(length - (tools[:, 2] - tools[:, 1]).sum())
            advantage = float(np.float32((-1) ** number * (0.3 + 0.2 * number)))
            samples.append(Sample(name, index, advantage, trained, weights[group] if weights else 1.0))
    return samples


def plan_of(
    layout: Sequence[Sequence[Sequence[Sequence[int]]]], samples: Sequence[Sample], step: int = 0, loss: Loss | None = None
) -> tuple[StepPlan, list[RankPlan]]:
    """Return plans for the samples numbered in `layout[mini_batch][rank][row]`; ranks with fewer rows get empty ones."""
    loss = loss or Loss()
    rows_of: list[list[list[Sample]]] = [[] for _ in layout[0]]
    sizes, denominators, tokens = [], [], []
    for mini_batch in layout:
        sizes.append(max(len(rows) for rows in mini_batch))
        trained = [samples[i] for rows in mini_batch for row in rows for i in row if samples[i].trained_tokens]
        tokens.append(sum(sample.trained_tokens for sample in trained))
        groups = {sample.payload for sample in trained}
        counts = {"token": tokens[-1], "sequence": len(trained), "group": len(groups), "constant": len(groups) * CONSTANT}
        denominators.append(float(counts[loss.denominator]))
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
        response_tokens=sum(tokens),
        total_tokens=0,
        stats={},
    )
    return plan, [RankPlan(rows) for rows in rows_of]
