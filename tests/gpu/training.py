"""Stages that train: tokens per second, MFU and memory of a step, its determinism, and checkpoints."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
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
ROWS = 4
KERNELS = 40  # listed in a profile


def step_8k(bench: Bench) -> Figures:
    """Train rows of 8k tokens at 0.6B."""
    return _step(bench, QWEN3_06B, 8192)


def step_16k(bench: Bench) -> Figures:
    """Train rows of 16k tokens at 0.6B."""
    return _step(bench, QWEN3_06B, 16_384)


def step_16k_compiled(bench: Bench) -> Figures:
    """Train rows of 16k tokens at 0.6B with `trainer.compile`."""
    return _step(bench, QWEN3_06B, 16_384, compile=True)


def step_32k(bench: Bench) -> Figures:
    """Train rows of 32k tokens at 0.6B, whose activations need 70 GB unless some are recomputed."""
    return _step(bench, QWEN3_06B, 32_768, gradient_checkpointing="selective")


def step_17b_16k(bench: Bench) -> Figures:
    """Train rows of 16k tokens at 1.7B, whose activations and state need 86 GB unless some are recomputed."""
    return _step(bench, QWEN3_17B, 16_384, gradient_checkpointing="selective")


def _config(bench: Bench, shape: Shape, row_tokens: int, **trainer: Any) -> RunConfig:
    dtype = str(bench.dtype).removeprefix("torch.")
    return make_config(
        bench.model(shape),
        run={"dir": str(bench.folder / "runs")},
        model={"dtype": dtype, "max_tokens": row_tokens},
        sampling={"temperature": 1.0, "max_tokens": row_tokens // 2},
        trainer={"row_tokens": row_tokens, "gradient_checkpointing": False, **trainer},
        loss={"kl_beta": 0.0},
        optimizer={"learning_rate": 1e-6},
    )


def _payloads(bench: Bench, row_tokens: int, vocabulary: int, ragged: int | None = None) -> dict[str, Payload]:
    """Return a group to fill each row: a prompt and eight responses, of equal or, with the seed `ragged`, of any length."""
    random, prompt = np.random.default_rng(ragged or 0), row_tokens // 16
    size = (row_tokens - prompt) // GROUP
    payloads = {}
    for row in range(ROWS):
        lengths = np.full(GROUP, size) if ragged is None else _ragged(random, GROUP * size)
        count = int(lengths.sum())
        payloads[f"0-{row}.1"] = Payload(
            prompt=random.integers(2, vocabulary, prompt).astype(np.int32),
            lengths=lengths.astype(np.int32),
            tokens=random.integers(2, vocabulary, count).astype(np.int32),
            logprobs=np.full(count, -np.log(vocabulary), np.float32),
            spans=np.zeros((0, 4), np.int32),
        )
    return payloads


def _ragged(random: np.random.Generator, tokens: int) -> np.ndarray:
    """Return the lengths of responses that fill a row, the longest about seven times as long as the shortest."""
    shares = random.uniform(0.25, 1.75, GROUP)
    return np.maximum(1, np.floor(shares / shares.sum() * tokens)).astype(np.int64)


def _train(policy: Policy, payloads: Mapping[str, Payload], step: int) -> Trained:
    samples = make_samples(payloads)
    rows = [list(range(row * GROUP, (row + 1) * GROUP)) for row in range(ROWS)]
    plan, ranks = plan_of([[rows]], samples, step, policy.config.loss)
    built = batches.build(ranks[0], payloads, vocabulary=policy.vocabulary, row_tokens=policy.config.trainer.row_tokens)
    return policy.train(built, plan)


def _tokens(payloads: Mapping[str, Payload]) -> int:
    return sum(len(payload.prompt) + int(payload.lengths.sum()) for payload in payloads.values())


def _timed(bench: Bench, policy: Policy, payloads: Mapping[str, Payload], step: int) -> tuple[float, dict[str, float]]:
    """Return the seconds of a step, and its metrics."""
    bench.wait()
    started = time.perf_counter()
    metrics = _train(policy, payloads, step).metrics
    bench.wait()
    return time.perf_counter() - started, metrics


def _step(bench: Bench, shape: Shape, row_tokens: int, **trainer: Any) -> Figures:
    row_tokens = bench.size(row_tokens, row_tokens // 128)
    policy = Policy(_config(bench, shape, row_tokens, **trainer), World())
    payloads = _payloads(bench, row_tokens, policy.vocabulary)
    first, _ = _timed(bench, policy, payloads, 0)  # compiles
    _timed(bench, policy, payloads, 1)
    bench.forget_peak()
    found = [_timed(bench, policy, payloads, step) for step in range(2, bench.size(7, 3))]
    seconds, metrics = min(found, key=lambda each: each[0])
    flops, peak = metrics["flops/train/sum"], policy.peak_tflops
    return {
        "tokens_per_s": round(_tokens(payloads) / seconds), "peak_mib": round(bench.peak_mib()), "row_tokens": row_tokens,
        "parameters": sum(weight.numel() for weight in policy.module.parameters()),
        "mfu": flops / seconds / (1e12 * peak) if peak else None, "tflops": 1e-12 * flops / seconds,
        "first_step_s": round(first, 2), "steps_s": [round(each, 4) for each, _ in found],
        "phases_s": {name: round(value, 4) for name, value in metrics.items() if name.startswith("time/train/")},
    }  # fmt: skip


def ragged_16k(bench: Bench) -> Figures:
    """Train full rows of responses of any length with `trainer.compile`, in new shapes and then in the same again."""
    row_tokens = bench.size(16_384, 128)
    policy = Policy(_config(bench, QWEN3_06B, row_tokens, compile=not bench.dry), World())
    for seed in (None, 100, 101, 102):  # compile for rows of some length, and then of any
        _timed(bench, policy, _payloads(bench, row_tokens, policy.vocabulary, seed), 0)
    flops, tokens, seconds, again = 0.0, 0, list[float](), list[float]()
    for seed in range(1, bench.size(5, 2)):
        payloads = _payloads(bench, row_tokens, policy.vocabulary, seed)
        took, metrics = _timed(bench, policy, payloads, 2 * seed - 1)
        seconds.append(took)
        again.append(_timed(bench, policy, payloads, 2 * seed)[0])
        flops, tokens = flops + metrics["flops/train/sum"], tokens + _tokens(payloads)
    peak = policy.peak_tflops
    return {
        "tokens_per_s": round(tokens / sum(seconds)), "new_shapes_mfu": flops / sum(seconds) / (1e12 * peak) if peak else None,
        "same_shapes_mfu": flops / sum(again) / (1e12 * peak) if peak else None,
        "new_shapes_s": [round(each, 4) for each in seconds], "same_shapes_s": [round(each, 4) for each in again],
    }  # fmt: skip


def profile(bench: Bench) -> Figures:
    """List the slowest kernels of a step of rows of 16k tokens at 0.6B with `trainer.compile`, and where the host waits for them.

    Leaves `trace.json.gz`, which https://ui.perfetto.dev shows.
    """
    from torch.profiler import ProfilerActivity

    row_tokens = bench.size(16_384, 128)
    policy = Policy(_config(bench, QWEN3_06B, row_tokens, compile=True), World())
    payloads = _payloads(bench, row_tokens, policy.vocabulary)
    for step in range(3):
        _timed(bench, policy, payloads, step)
    places = _waits(bench, lambda: _timed(bench, policy, payloads, 3))
    of_device = [ProfilerActivity.CPU if bench.dry else ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=of_device) as profiled:
        seconds, _ = _timed(bench, policy, payloads, 4)
    key = "self_cpu_time_total" if bench.dry else "self_device_time_total"
    events = sorted(profiled.key_averages(), key=lambda event: -getattr(event, key))
    busy = sum(getattr(event, key) for event in events)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, *of_device]) as traced:
        _timed(bench, policy, payloads, 5)
    traced.export_chrome_trace(str(bench.folder / "trace.json.gz"))
    return {
        "step_s": round(seconds, 4), "busy_s": round(1e-6 * busy, 4), "waits": places,
        "kernels_ms": [[event.key[:100], event.count, round(1e-3 * getattr(event, key), 2)] for event in events[:KERNELS]],
    }  # fmt: skip


def _waits(bench: Bench, call: Callable[[], object]) -> dict[str, int]:
    """Return how often the host waits for the device, by line of code."""
    if bench.dry:
        return {}
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = Counter(f"{'/'.join(Path(each.filename).parts[-3:])}:{each.lineno}" for each in caught)
    return dict(found.most_common())


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
    """Save after a step and load into another policy: seconds, size, and whether the next step gives the same bits."""
    row_tokens, folder = bench.size(8192, 64), bench.folder / "checkpoint"
    config = _config(bench, QWEN3_06B, row_tokens, deterministic=True)  # other kernels for GPUs are not reproducible
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
