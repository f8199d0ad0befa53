"""Stages that train: tokens per second, MFU and memory of a step, its determinism, and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.config import RunConfig
from services.protocol.payloads import Payload
from services.trainer.ranks import World
from services.trainer.step import batches
from services.trainer.step.policy import Policy, Trained
from tests.gpu.bench import QWEN3_06B, QWEN3_17B, Bench, Figures, Shape
from tests.support.models.tiny_model import make_config, make_samples, plan_of

GROUP = 8
ROWS = 2


def step_8k(bench: Bench) -> Figures:
    """Train rows of 8k tokens at 0.6B."""
    return _step(bench, QWEN3_06B, 8192)


def step_16k(bench: Bench) -> Figures:
    """Train rows of 16k tokens at 0.6B."""
    return _step(bench, QWEN3_06B, 16_384)


def step_32k(bench: Bench) -> Figures:
    """Train rows of 32k tokens at 0.6B."""
    return _step(bench, QWEN3_06B, 32_768)


def step_17b_16k(bench: Bench) -> Figures:
    """Train rows of 16k tokens at 1.7B."""
    return _step(bench, QWEN3_17B, 16_384)


def _config(bench: Bench, shape: Shape, row_tokens: int, **trainer: Any) -> RunConfig:
    dtype = str(bench.dtype).removeprefix("torch.")
    return make_config(
        bench.model(shape),
        run={"dir": str(bench.folder / "runs")},
        model={"dtype": dtype, "max_tokens": row_tokens},
        sampling={"temperature": 1.0, "max_tokens": row_tokens // 2},
        trainer={"row_tokens": row_tokens, "gradient_checkpointing": not bench.dry, **trainer},
        loss={"kl_beta": 0.0},
        optimizer={"learning_rate": 1e-6},
    )


def _payloads(bench: Bench, row_tokens: int, vocabulary: int) -> dict[str, Payload]:
    """A group that fills each row: a prompt and eight responses."""
    random, prompt = np.random.default_rng(0), row_tokens // 16
    length = (row_tokens - prompt) // GROUP
    return {
        f"0-{row}.1": Payload(
            prompt=random.integers(2, vocabulary, prompt).astype(np.int32),
            lengths=np.full(GROUP, length, np.int32),
            tokens=random.integers(2, vocabulary, GROUP * length).astype(np.int32),
            logprobs=np.full(GROUP * length, -np.log(vocabulary), np.float32),
            spans=np.zeros((0, 4), np.int32),
        )
        for row in range(ROWS)
    }


def _train(policy: Policy, payloads: Mapping[str, Payload], step: int) -> Trained:
    samples = make_samples(payloads)
    rows = [list(range(row * GROUP, (row + 1) * GROUP)) for row in range(ROWS)]
    plan, ranks = plan_of([[rows]], samples, step, policy.config.loss)
    built = batches.build(ranks[0], payloads, vocabulary=policy.vocabulary, row_tokens=policy.config.trainer.row_tokens)
    return policy.train(built, plan)


def _step(bench: Bench, shape: Shape, row_tokens: int) -> Figures:
    row_tokens = bench.size(row_tokens, row_tokens // 128)
    policy = Policy(_config(bench, shape, row_tokens), World())
    payloads = _payloads(bench, row_tokens, policy.vocabulary)
    metrics = _train(policy, payloads, 0).metrics
    bench.forget_peak()
    seconds: list[float] = []
    for step in range(1, bench.size(4, 2)):
        bench.wait()
        started = time.perf_counter()
        metrics = _train(policy, payloads, step).metrics
        bench.wait()
        seconds.append(time.perf_counter() - started)
    tokens = sum(len(payload.prompt) + int(payload.lengths.sum()) for payload in payloads.values())
    flops, peak = metrics["flops/train/sum"], policy.peak_tflops
    return {
        "tokens_per_s": round(tokens / min(seconds)), "peak_mib": round(bench.peak_mib()), "row_tokens": row_tokens,
        "parameters": sum(weight.numel() for weight in policy.module.parameters()),
        "mfu": flops / min(seconds) / (1e12 * peak) if peak else None, "tflops": 1e-12 * flops / min(seconds),
        "phases_s": {name: round(value, 4) for name, value in metrics.items() if name.startswith("time/train/")},
    }  # fmt: skip


def _bits(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: weight.detach().cpu().clone() for name, weight in policy.module.named_parameters()}


def _equal(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def determinism(bench: Bench) -> Figures:
    """Train the same two steps twice with `trainer.deterministic`, and compare the bits."""
    row_tokens = bench.size(8192, 64)
    found = []
    for _ in range(2):
        policy = Policy(_config(bench, QWEN3_06B, row_tokens, deterministic=True), World())
        payloads = _payloads(bench, row_tokens, policy.vocabulary)
        for step in range(2):
            _train(policy, payloads, step)
        found.append(_bits(policy))
        del policy
    return {"bit_equal": _equal(*found)}


def checkpoint(bench: Bench) -> Figures:
    """Save after a step and load into another policy: seconds, size, and whether the next step has the same bits."""
    row_tokens, folder = bench.size(8192, 64), bench.folder / "checkpoint"
    config = _config(bench, QWEN3_06B, row_tokens, deterministic=True)  # other kernels for GPUs never repeat their bits
    policy = Policy(config, World())
    payloads = _payloads(bench, row_tokens, policy.vocabulary)
    _train(policy, payloads, 0)
    folder.mkdir()
    started = time.perf_counter()
    policy.save(folder)
    saving = time.perf_counter() - started
    _train(policy, payloads, 1)
    expected = _bits(policy)
    del policy
    other = Policy(config, World())
    started = time.perf_counter()
    other.load(folder)
    loading = time.perf_counter() - started
    _train(other, payloads, 1)
    size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    return {
        "save_s": round(saving, 3), "load_s": round(loading, 3), "gb": round(size / 1e9, 3),
        "resumed_bit_equal": _equal(expected, _bits(other)),
    }  # fmt: skip
