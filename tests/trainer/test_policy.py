"""Real DeepSpeed ranks: one gradient for any number of ranks, any packing, any micro-batch split and any ZeRO stage.

The twin computes every response alone, in float64, with transformers' own attention, and follows the written formulas.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.protocol.messages import Payload, Sample
from tests.trainer.rank_worker import Job, launch
from tests.trainer.tiny import make_config, make_model, make_payloads, make_samples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SECTIONS: dict[str, Any] = {
    "loss": {"kl_beta": 0.1, "kl_estimator": "k3"},
    "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.5},
}
ONE_MINI_BATCH: dict[str, Any] = {
    "alone": [[[[i] for i in range(12)]]],
    "packed": [[[[3, 1, 0, 2], [5, 4, 11, 7, 6], [9, 10, 8]]]],
    "two": [[[[0, 1, 2, 3, 4], [5, 6, 7]], [[11, 8, 9, 10]]]],
    "four": [[[[0, 1], [2], [3, 4, 5]], [[6, 7, 8]], [], [[11], [10, 9]]]],
}
TWO_MINI_BATCHES: dict[str, Any] = {
    "one": [[[[0, 1, 2], [3, 4, 5]]], [[[11, 10, 9, 8], [7], [6]]]],
    "two": [[[[5, 4, 3, 2]], [[0, 1]]], [[[6], [7]], [[8, 9, 10, 11]]]],
    "four": [[[[0]], [[1, 2, 3]], [[4]], [[5]]], [[[6, 7]], [[8, 9]], [[10, 11]], []]],
}
OTHER_NUMBERS = {"tied zero0", "tied zero3", "bfloat16 zero0", "bfloat16 zero2", "bfloat16 zero3", "non-finite"}


@pytest.fixture(scope="module")
def payloads() -> dict[str, Payload]:
    groups = make_payloads(groups=3, size=4)
    for payload in groups.values():
        payload.logprobs[::9] = np.nan  # behaviour logprobs that an engine failed to give
    return groups


@pytest.fixture(scope="module")
def samples(payloads: dict[str, Payload]) -> list[Sample]:
    return make_samples(payloads, masked=[2, 7])


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="module")
def results(
    tiny_model: Path, tied_model: Path, payloads: Any, samples: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Any]]:
    """What every job returned, by name, one per rank."""

    def job(layout: Any, model: Path = tiny_model, dtype: str = "float32", **trainer: Any) -> Job:
        sections = SECTIONS | {"trainer": {"row_tokens": 128, "logprob_chunk_tokens": 5, "step_timeout_s": 60.0} | trainer}
        sections |= {"model": {"path": str(model), "dtype": dtype, "max_tokens": 256}}
        return "train", {"model": model, "sections": sections, "payloads": payloads, "samples": samples, "layouts": [layout]}

    of_size: dict[int, dict[str, Job]] = {
        1: {
            "alone": job(ONE_MINI_BATCH["alone"]),
            "packed": job(ONE_MINI_BATCH["packed"], gradient_checkpointing=True, deterministic=True),
            "zero3 alone": job(ONE_MINI_BATCH["alone"], zero_stage=3),
            "mini one": job(TWO_MINI_BATCHES["one"]),
        },
        2: {
            "two": job(ONE_MINI_BATCH["two"]),
            "zero1 two": job(ONE_MINI_BATCH["two"], zero_stage=1),
            "zero2 two": job(ONE_MINI_BATCH["two"], zero_stage=2, offload=True),
            "zero3 two": job(ONE_MINI_BATCH["two"], zero_stage=3, gradient_checkpointing=True),
            "tied zero0": job(ONE_MINI_BATCH["two"], tied_model),
            "tied zero3": job(ONE_MINI_BATCH["two"], tied_model, zero_stage=3),
            "bfloat16 zero0": job(ONE_MINI_BATCH["two"], dtype="bfloat16"),
            "bfloat16 zero2": job(ONE_MINI_BATCH["two"], dtype="bfloat16", zero_stage=2),
            "bfloat16 zero3": job(ONE_MINI_BATCH["two"], dtype="bfloat16", zero_stage=3),
            "non-finite": ("non_finite", {"model": tiny_model, "payloads": payloads, "samples": samples}),
            "mini two": job(TWO_MINI_BATCHES["two"]),
            "mini zero2 two": job(TWO_MINI_BATCHES["two"], zero_stage=2),
            "mini zero3 two": job(TWO_MINI_BATCHES["two"], zero_stage=3),
        },
        4: {"four": job(ONE_MINI_BATCH["four"]), "mini four": job(TWO_MINI_BATCHES["four"])},
    }
    found: dict[str, list[Any]] = {}
    for size, jobs in of_size.items():
        outcome = launch(size, list(jobs.values()), tmp_path_factory.mktemp("ranks") / str(size))
        found |= dict(zip(jobs, outcome, strict=True))
    return found


def _twin(folder: Path, payloads: Any, samples: list[Sample], mini_batches: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    """Gradients of each mini-batch's optimizer step."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    options = make_config(folder, **SECTIONS).optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.learning_rate, betas=(options.beta1, options.beta2), weight_decay=0.0
    )

    def logprobs(sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        payload = payloads[sample.payload]
        start = int(payload.lengths[: sample.index].sum())
        response = slice(start, start + int(payload.lengths[sample.index]))
        ids = torch.from_numpy(np.concatenate((payload.prompt, payload.tokens[response])).astype(np.int64))
        table = (model(ids[None]).logits[0] / 0.7).log_softmax(-1)
        first = len(payload.prompt)
        return table[torch.arange(first - 1, len(ids) - 1), ids[first:]], torch.from_numpy(payload.logprobs[response].copy())

    with torch.no_grad():
        before = [logprobs(sample)[0] for sample in samples]
    gradients = []
    for numbers in mini_batches:
        total, count = torch.zeros((), dtype=torch.float64), 0
        for number in numbers:
            if not samples[number].trained_tokens:
                continue
            theta, behaviour = logprobs(samples[number])
            for token in range(len(theta)):
                if not behaviour[token].isfinite():
                    continue
                old, advantage = before[number][token], samples[number].advantage
                r, difference = torch.exp(theta[token] - old), theta[token] - old
                policy = torch.maximum(-advantage * r, -advantage * r.clamp(0.8, 1.272))
                weight = torch.exp((old - behaviour[token]).clamp(-10, 10)).clamp(0, 2)
                total, count = total + weight * policy + 0.1 * r * difference, count + 1
        optimizer.zero_grad()
        (total / count).backward()
        gradients.append(
            {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
        )
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm)
        optimizer.step()
    return gradients


def _largest_difference(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest deviation of an element, relative to the largest element of its parameter."""
    assert ours.keys() == expected.keys()
    return max(float((ours[name].double() - value).abs().max() / value.abs().max()) for name, value in expected.items())


def test_gradient_is_that_of_the_formula(tiny_model: Path, payloads: Any, samples: Any, results: dict[str, list[Any]]) -> None:
    (expected,) = _twin(tiny_model, payloads, samples, [list(range(12))])
    names = ["alone", "packed", "zero3 alone", "two", "zero1 two", "zero2 two", "zero3 two", "four"]
    differences = {
        (name, rank): _largest_difference(result["gradients"][0], expected)
        for name in names
        for rank, result in enumerate(results[name])
    }
    assert max(differences.values()) < 1e-4, differences


def test_gradient_of_tied_embeddings(tied_model: Path, payloads: Any, samples: Any, results: dict[str, list[Any]]) -> None:
    (expected,) = _twin(tied_model, payloads, samples, [list(range(12))])
    assert "lm_head.weight" not in expected
    for result in results["tied zero0"] + results["tied zero3"]:
        assert _largest_difference(result["gradients"][0], expected) < 1e-4


def test_gradient_in_bfloat16_is_close(tiny_model: Path, payloads: Any, samples: Any, results: dict[str, list[Any]]) -> None:
    (expected,) = _twin(tiny_model, payloads, samples, [list(range(12))])
    for name in ("bfloat16 zero0", "bfloat16 zero2", "bfloat16 zero3"):
        for result in results[name]:
            assert _largest_difference(result["gradients"][0], expected) < 0.1, name
            assert result["metrics"][0]["logprob_gap/train/mean"] > 0


def test_numbers_that_are_none_stop_every_rank(results: dict[str, list[Any]]) -> None:
    for of_reference, of_policy in results["non-finite"]:
        assert "step 0: the loss is nan. The step must not be committed" in of_reference
        assert "step 0: the gradient's norm is nan" in of_policy


def test_mini_batches_follow_the_formula(tiny_model: Path, payloads: Any, samples: Any, results: dict[str, list[Any]]) -> None:
    first, second = _twin(tiny_model, payloads, samples, [list(range(6)), list(range(6, 12))])
    for name in (name for name in results if name.startswith("mini")):
        for result in results[name]:
            assert _largest_difference(result["gradients"][0], first) < 1e-4, name
            assert _largest_difference(result["gradients"][1], second) < 2e-3, name


def test_metrics_are_those_of_all_tokens_for_any_layout(payloads: Any, samples: Any, results: dict[str, list[Any]]) -> None:
    planned = sum(sample.trained_tokens for sample in samples)
    for family in (False, True):
        names = [name for name in results if name.startswith("mini") == family and name not in OTHER_NUMBERS]
        metrics = [result["metrics"][0] for name in names for result in results[name]]
        for one in metrics:
            assert one["tokens/train/sum"] + one["excluded/train/tokens"] == planned
            assert one["excluded/train/tokens"] > 0
            for name, value in one.items():
                if not name.startswith("time/"):
                    assert value == pytest.approx(metrics[0][name], rel=1e-3, abs=1e-5), name
    first = results["alone"][0]["metrics"][0]
    assert first["ratio/train/mean"] == 1
    assert first["ratio/train/var"] == first["clip_low/train/fraction"] == first["clip_high/train/fraction"] == 0
    assert results["mini one"][0]["metrics"][0]["ratio/train/var"] > 0


def test_gradient_norm_and_clipping(tiny_model: Path, results: dict[str, list[Any]]) -> None:
    for name in set(results) - {"non-finite"}:
        ranks = results[name]
        for result in ranks:
            norms = [float(torch.cat([g.flatten() for g in step.values()]).norm()) for step in result["gradients"]]
            assert result["metrics"][0]["gradient/train/norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-4), name


def test_all_ranks_hold_the_same_weights_afterwards(results: dict[str, list[Any]]) -> None:
    for name in set(results) - {"non-finite"}:
        ranks = results[name]
        for result in ranks[1:]:
            assert all(torch.equal(value, ranks[0]["weights"][key]) for key, value in result["weights"].items()), name
