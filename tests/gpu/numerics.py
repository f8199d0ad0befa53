"""Stages that compare the device's results with float64 on the CPU, and measure their cost."""

from __future__ import annotations

import itertools
import os
import shutil
from unittest.mock import patch

import torch
import torch.nn.functional as F

from services.config.loss import POLICIES, Loss
from services.trainer import losses
from services.trainer.losses.policies import Tokens, check
from services.trainer.model.attention import flash2, flash4, fused
from services.trainer.model.attention import packed_attention as attend
from services.trainer.model.attention.explicit import ScoreRule
from services.trainer.model.attention.packing import Packing
from services.trainer.model.logprobs import token_logprobs
from tests.gpu.bench import Bench, Figures, difference


def device(bench: Bench) -> Figures:
    """Identify the device and its software, and measure matrix products and copies."""
    import transformers
    from torch.cuda import nccl

    figures: Figures = {
        "torch": torch.__version__, "transformers": transformers.__version__, "cores": os.cpu_count(),
        "compiler": shutil.which(os.environ.get("CC", "gcc")),  # without one, nothing can be compiled for the GPU either
    }  # fmt: skip
    if not bench.dry:
        seen = torch.cuda.get_device_properties(0)
        figures |= {
            "name": seen.name, "memory_gib": round(seen.total_memory / 2**30, 1), "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, nccl.version())), "cudnn": torch.backends.cudnn.version(),
            "flash_attention": flash4.installed() or 2,
        }  # fmt: skip
    size = bench.size(8192, 128)
    one = torch.randn(size, size, device=bench.device, dtype=bench.dtype)
    seconds = bench.timed(lambda: one @ one)
    copied = torch.empty(bench.size(2**30, 2**16), device=bench.device, dtype=torch.uint8)
    target = torch.empty_like(copied)
    copying = bench.timed(lambda: target.copy_(copied))
    return figures | {
        "matmul_tflops": round(2e-12 * size**3 / seconds, 3),
        "copy_gb_per_s": round(2e-9 * copied.numel() / copying, 2),
    }


def all_losses(bench: Bench) -> Figures:
    """Compare loss and gradient of every policy term with float64 on the CPU, for logprobs in float32."""
    torch.manual_seed(0)
    count = bench.size(100_000, 500)
    values = {
        name: torch.randn(count, dtype=torch.float64) * scale + shift
        for name, scale, shift in (("logprobs", 0.3, -1), ("behaviour", 0.3, -1), ("reference", 0.3, -1), ("advantages", 1, 0))
    }
    errors: dict[str, float] = {}
    for policy in POLICIES:
        config = Loss(policy=policy, kl_beta=0.1, entropy_coefficient=0.01)
        check(config)
        expected = _loss(values, config, torch.device("cpu"), torch.float64)
        found = _loss(values, config, bench.device, torch.float32)
        errors[policy] = max(difference(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    return {"worst_error": max(errors.values()), "errors": errors, "tokens": count}


def _loss(values: dict[str, torch.Tensor], config: Loss, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    columns = {name: column.to(torch.float32).to(device, dtype) for name, column in values.items()}
    logprobs = columns["logprobs"].clone().requires_grad_()
    ones = torch.ones_like(logprobs)
    samples = torch.arange(len(logprobs), device=device) // 50
    tokens = Tokens(
        logprobs, columns["behaviour"], columns["behaviour"], columns["reference"], columns["advantages"], ones, ones,
        -logprobs, samples,
    )  # fmt: skip
    loss = losses.compute(tokens, config, float(len(logprobs))).loss
    loss.backward()
    assert logprobs.grad is not None
    return [loss.detach(), logprobs.grad]


class _Layer(torch.nn.Module):
    """Stands in for the layer that calls attention."""


def _row(bench: Bench) -> tuple[Packing, list[tuple[int, int]], int]:
    """Return a row of responses in groups that share a prompt, and each response's prompt and own length."""
    group, groups = 8, bench.size(4, 2)
    prompt, response = bench.size(512, 5), bench.size(448, 7)
    lengths, prompts, start = [], [], 0
    for _ in range(groups):
        lengths += [prompt + response, *[response] * (group - 1)]
        prompts += [(0, 0), *[(start, prompt)] * (group - 1)]
        start += prompt + group * response
    return Packing.of(lengths, prompts), [(prompt, response)] * (group * groups), start


def _states(bench: Bench, tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    heads, kv, size = (16, 8, 128) if not bench.dry else (4, 2, 16)
    torch.manual_seed(1)
    return [
        torch.randn(1, count, tokens, size, device=bench.device, dtype=dtype, requires_grad=True) for count in (heads, kv, kv)
    ]


def _dense(states: list[torch.Tensor], packing: Packing) -> torch.Tensor:
    """Return the attention of a row with a mask, [T, heads, D] float64; one head at a time, whose scores take 2 GB."""
    query, key, value = (each.detach().double()[0] for each in states)
    key, value = (each.repeat_interleave(len(query) // len(each), 0) for each in (key, value))
    hidden = ~row_mask(packing).to(query.device)
    found = torch.empty_like(query)
    for head in range(len(query)):
        scores = query[head] @ key[head].T * query.shape[-1] ** -0.5
        found[head] = scores.masked_fill_(hidden, -torch.inf).softmax(-1) @ value[head]
    return found.transpose(0, 1)


def row_mask(packing: Packing, window: int | None = None) -> torch.Tensor:
    """Return which tokens each token of the row attends to, [T, T] bool, built sequence by sequence."""
    tokens, bounds = int(packing.own[-1]), packing.whole.tolist()
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for begin, end in itertools.pairwise(bounds):
        places, size = packing.sequences[begin:end], end - begin
        seen = torch.ones(size, size, dtype=torch.bool).tril()
        mask[places[:, None], places[None]] |= seen if window is None else seen.triu(1 - window)
    return mask


def _attended(states: list[torch.Tensor], packing: Packing) -> torch.Tensor:
    query, key, value = states
    return attend(_Layer(), query, key, value, None, packing=packing)[0]


def packed_attention(bench: Bench) -> Figures:
    """Compare packed attention with shared prompts against a dense mask in float64, and time it against separate sequences."""
    packing, shapes, tokens = _row(bench)
    placed = packing.to(bench.device)
    errors, seconds = dict[str, float](), dict[str, float]()
    kernels = {"padded float32": (torch.float32, ()), "flash2": (bench.dtype, (flash2,))}
    if flash4.installed():
        kernels["flash4"] = bench.dtype, (flash4,)
    for name, (dtype, those) in kernels.items():
        states = _states(bench, tokens, dtype)

        def packed(states: list[torch.Tensor] = states) -> None:
            _attended(states, placed).float().sum().backward()

        with patch.object(fused, "available", lambda those=those: those):
            errors[name] = difference(_attended(states, placed)[0].detach(), _dense(states, packing))
            seconds[name] = bench.timed(packed)

    prompt, response = shapes[0]
    alone = [torch.randn(len(shapes), each.shape[1], prompt + response, each.shape[3], device=bench.device, dtype=bench.dtype,
                         requires_grad=True) for each in states]  # fmt: skip

    def each_alone() -> None:
        F.scaled_dot_product_attention(alone[0], alone[1], alone[2], is_causal=True, enable_gqa=True).float().sum().backward()

    return {"errors": errors, "tokens": tokens, "packed_s": seconds, "alone_s": bench.timed(each_alone)}


def attention_rules(bench: Bench) -> Figures:
    """Compare fused attention and its gradients with padded batches in float64: windows, capped scores, sinks, sizes of heads.

    `worst_error` is relative to the largest value; `uncomputed` has what no kernel here computes.
    """
    scale, unit = 1 if bench.dry else 16, 16 if bench.dry else 64
    lengths = [each * scale for each in (44, 19, 25, 16)] + [1, 3]
    placed = Packing.of(lengths, [(0, 0), (0, 12 * scale), (0, 12 * scale), (0, 0), (0, 1), (0, 0)]).to(bench.device)
    errors, uncomputed = dict[str, float](), list[str]()
    for name, (rule, kv_heads, size, values) in _rules(bench, 8 * scale, unit).items():
        torch.manual_seed(1)
        shapes = (8, size), (kv_heads, size), (kv_heads, values)
        states = [torch.randn(sum(lengths), *shape, device=bench.device, dtype=bench.dtype) for shape in shapes]
        if not bench.dry and not fused.kernels_of(fused.available(), *states, rule):
            uncomputed.append(name)
            continue
        factors = torch.randn(sum(lengths), 8, values, device=bench.device, dtype=bench.dtype)
        expected = _differentiated([each.double() for each in states], factors, placed, rule)
        found = _differentiated(states, factors, placed, rule)
        errors[name] = max(difference(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    return {"worst_error": max(errors.values()), "errors": errors, "uncomputed": uncomputed}


def _rules(bench: Bench, window: int, unit: int) -> dict[str, tuple[ScoreRule, int, int, int]]:
    """Return rules with a number of heads of keys, a size of heads, and one of values."""
    sinks, size = torch.linspace(-1, 2, 8, device=bench.device).to(bench.dtype), 2 * unit
    return {
        "groups of two": (ScoreRule(size**-0.5), 4, size, size), "one head of keys": (ScoreRule(size**-0.5), 1, size, size),
        "no groups": (ScoreRule(size**-0.5), 8, size, size), "window": (ScoreRule(size**-0.5, window), 4, size, size),
        "capped": (ScoreRule(size**-0.5, None, 30.0), 4, size, size),
        "capped in a window, large heads": (ScoreRule(0.06, window, 50.0), 4, 2 * size, 2 * size),
        "sinks": (ScoreRule(unit**-0.5, None, None, sinks), 4, unit, unit),
        "sinks in a window": (ScoreRule(unit**-0.5, window, None, sinks), 4, unit, unit),
        "large heads": (ScoreRule(0.06), 4, 2 * size, 2 * size), "small heads": (ScoreRule(0.18), 4, unit // 2, unit // 2),
        "smaller values": (ScoreRule(0.07), 8, 3 * unit, size),
        "smaller shared values": (ScoreRule(0.07), 4, 3 * unit, size),
        "heads of 80": (ScoreRule(80**-0.5), 4, 80, 80),
    }  # fmt: skip


def _differentiated(states: list[torch.Tensor], factors: torch.Tensor, packing: Packing, rule: ScoreRule) -> list[torch.Tensor]:
    """Return the attention of [T, heads, D] and the gradients of queries, keys, values and sinks."""
    inputs = [each.clone().requires_grad_() for each in states]
    sinks = None if rule.sinks is None else rule.sinks.to(states[0].dtype, copy=True).requires_grad_()
    query, key, value = (each.transpose(0, 1)[None] for each in inputs)
    output = attend(
        _Layer(), query, key, value, None, packing=packing, scaling=rule.scaling, sliding_window=rule.window,
        softcap=rule.softcap, s_aux=sinks,
    )[0][0]  # fmt: skip
    inputs += [] if sinks is None else [sinks]
    return [output.detach(), *torch.autograd.grad((output * factors.to(output.dtype)).sum(), inputs)]


def chunked_logprobs(bench: Bench) -> Figures:
    """Compare chunked logprobs with those from whole logits: error, peak memory, time."""
    vocabulary, hidden, count = bench.size(151_936, 96), bench.size(1024, 48), bench.size(8192, 64)
    torch.manual_seed(2)
    weight = torch.randn(vocabulary, hidden, device=bench.device, dtype=bench.dtype, requires_grad=True)
    states = (torch.randn(count, hidden, device=bench.device, dtype=bench.dtype) / hidden**0.5).requires_grad_()
    targets = torch.randint(vocabulary, (count,), device=bench.device)

    def chunked() -> torch.Tensor:
        found, _ = token_logprobs(states, weight, targets, 1.0, bench.size(1024, 16))
        found.sum().backward()
        return found.detach()

    def whole() -> torch.Tensor:
        found = (states @ weight.T).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        found.sum().backward()
        return found.detach()

    peaks = {}
    for name, call in (("chunked", chunked), ("whole", whole)):
        bench.forget_peak()
        call()
        peaks[name] = round(bench.peak_mib())
    error = difference(chunked(), whole())
    return {"worst_error": error, "peak_mib": peaks, "speed_ratio": bench.timed(whole) / bench.timed(chunked)}
