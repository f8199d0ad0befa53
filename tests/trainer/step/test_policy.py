"""Real DeepSpeed ranks: one gradient for any number of ranks, any packing, any micro-batch split and any ZeRO stage.

The twin computes every response alone, in float64, with transformers' own attention, and follows the written formulas.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from services.protocol.messages import Sample
from services.protocol.payloads import Payload
from tests.support.documented import undocumented
from tests.support.models.rank_worker import Job, launch
from tests.support.models.tiny_model import make_config, make_model, make_payloads, make_samples
from tests.trainer import loss_variants

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SECTIONS: dict[str, Any] = {
    "loss": {"kl_beta": 0.1, "correction_upper": 1.99},
    "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.5},
    "replay": {"sampler": "prioritized", "priority": "trainer", "max_uses": 2},
}
ROWS = [[3, 1, 0, 2], [5, 4, 11], [7, 6], [9, 10], [8]]
"""Five rows, which divide evenly only with one rank."""
MASKED = [2, 7]
WEIGHTS = [0.5, 1.0, 0.125]  # importance weights of the groups
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
OTHER_NUMBERS = {
    "tied zero0",
    "tied zero3",
    "bfloat16 zero0",
    "bfloat16 zero2",
    "bfloat16 zero3",
    "non-finite",
    "clip one",
    "clip two",
    "fixed point",
    *(f"decay {stage}" for stage in range(4)),
    *(f"losses {ranks}" for ranks in (1, 2, 4)),
}
NOT_TRAINED = {
    "non-finite", "fixed point", *(f"decay {stage}" for stage in range(4)), *(f"losses {ranks}" for ranks in (1, 2, 4)),
}  # fmt: skip


def _dealt(ranks: int) -> Any:
    """Return the layout of `ROWS` on `ranks` ranks."""
    return [[ROWS[rank::ranks] for rank in range(ranks)]]


GRADIENTS = [torch.randn(50, generator=torch.Generator().manual_seed(seed)) * 10.0**-seed for seed in range(7)]


@pytest.fixture(scope="module")
def payloads() -> dict[str, Payload]:
    groups = {}
    for name, payload in make_payloads(groups=3, size=4).items():
        payload.logprobs[::9] = np.nan  # behaviour logprobs missing from the engine
        longest = int(payload.lengths.argmax())
        middle = int(payload.lengths[longest]) // 2
        tools = [(longest, middle - 2, middle), (longest, middle + 1, middle + 3)]
        if not groups:
            tools.append((1, 0, int(payload.lengths[1])))  # a completion of tool tokens only
        groups[name] = msgspec.structs.replace(payload, tool_spans=np.array(tools, np.int32))
    return groups


@pytest.fixture(scope="module")
def samples(payloads: dict[str, Payload]) -> list[Sample]:
    return make_samples(payloads, MASKED, WEIGHTS)


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="module")
def results(
    tiny_model: Path, tied_model: Path, payloads: Any, samples: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Any]]:
    """Return the results of every job by name, one per rank."""

    def job(layout: Any, model: Path = tiny_model, dtype: str = "float32", clip: float | None = None, **trainer: Any) -> Job:
        sections = SECTIONS | {"trainer": {"row_tokens": 128} | trainer}
        sections |= {"model": {"path": str(model), "dtype": dtype, "max_tokens": 256}}
        if clip is not None:
            sections |= {"loss": SECTIONS["loss"] | {"clip_low": clip, "clip_high": clip}}
        return "train", {"model": model, "sections": sections, "payloads": payloads, "samples": samples, "layouts": [layout]}

    def losses(layout: str) -> Job:
        given = {"model": tiny_model, "sections": SECTIONS, "payloads": payloads, "samples": samples}
        return "variants", given | {"layout": ONE_MINI_BATCH[layout], "losses": loss_variants.VARIANTS}

    light: dict[str, Any] = {"offload": True, "gradient_checkpointing": True}
    of_size: dict[int, dict[str, Job]] = {
        1: {
            "alone": job(ONE_MINI_BATCH["alone"]),
            "packed": job(ONE_MINI_BATCH["packed"], gradient_checkpointing=True, deterministic=True),
            "zero3 alone": job(ONE_MINI_BATCH["alone"], zero_stage=3),
            "mini one": job(TWO_MINI_BATCHES["one"]),
            "clip one": job(TWO_MINI_BATCHES["one"], clip=0.002),
            "losses 1": losses("packed"),
            "exact 1": job(_dealt(1), deterministic=True),
            "plain 1": job(_dealt(1)),
            **{f"offload {stage} one": job(_dealt(1), zero_stage=stage, **light) for stage in (1, 2, 3)},
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
            "clip two": job(TWO_MINI_BATCHES["two"], clip=0.002),
            "losses 2": losses("two"),
            "exact 2": job(_dealt(2), deterministic=True),
            "plain 2": job(_dealt(2)),
            **{f"offload {stage} two": job(_dealt(2), zero_stage=stage, **light) for stage in (1, 2, 3)},
            "sequence 2": job(_dealt(1), sequence_parallel=2, gradient_checkpointing=True),
            "sequence 2 zero3": job(ONE_MINI_BATCH["packed"], sequence_parallel=2, zero_stage=3),
            "mini sequence 2": job(TWO_MINI_BATCHES["one"], sequence_parallel=2),
            **{f"decay {stage}": ("decay", {"model": tiny_model, "stage": stage}) for stage in range(4)},
            "fixed point": ("fixed point", {"gradients": GRADIENTS}),
            "mini zero2 two": job(TWO_MINI_BATCHES["two"], zero_stage=2),
            "mini zero3 two": job(TWO_MINI_BATCHES["two"], zero_stage=3),
        },
        4: {
            "four": job(ONE_MINI_BATCH["four"]),
            "mini four": job(TWO_MINI_BATCHES["four"]),
            "losses 4": losses("four"),
            "exact 4": job(_dealt(4), deterministic=True),
            "plain 4": job(_dealt(4)),
            "sequence 4": job(_dealt(1), sequence_parallel=4),  # more ranks than key/value heads
            "sequence 2 data 2": job(_dealt(2), sequence_parallel=2),
        },
    }
    found: dict[str, list[Any]] = {}
    for size, jobs in of_size.items():
        outcome = launch(size, list(jobs.values()), tmp_path_factory.mktemp("ranks") / str(size))
        found |= dict(zip(jobs, outcome, strict=True))
    return found


def _twin(folder: Path, payloads: Any, samples: list[Sample], mini_batches: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    """Return the gradients of each mini-batch's optimizer step."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    logprobs = partial(_logprobs, model, payloads)
    options = make_config(folder, **SECTIONS).optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.learning_rate, betas=(options.betas[0], options.betas[1]), weight_decay=0.0
    )

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
                truncated = torch.exp((old - behaviour[token]).clamp(-10, 10)).clamp(0, 1.99)
                total = total + samples[number].weight * (truncated * policy + 0.1 * (torch.exp(-difference) - 1 + difference))
                count += 1
        optimizer.zero_grad()
        (total / count).backward()
        gradients.append(
            {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
        )
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm)
        optimizer.step()
    return gradients


def _logprobs(model: Any, payloads: Any, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """Return theta and mu of the sample's tokens; mu is NaN where the policy did not sample."""
    payload = payloads[sample.payload]
    start = int(payload.lengths[: sample.index].sum())
    response = slice(start, start + int(payload.lengths[sample.index]))
    ids = torch.from_numpy(np.concatenate((payload.prompt, payload.tokens[response])).astype(np.int64))
    table = (model(ids[None]).logits[0] / 0.7).log_softmax(-1)
    behaviour = torch.from_numpy(payload.logprobs[response].copy())
    for owner, first, end in payload.tool_spans.tolist():
        if owner == sample.index:
            behaviour[first:end] = torch.nan
    first = len(payload.prompt)
    return table[torch.arange(first - 1, len(ids) - 1), ids[first:]], behaviour


def _largest_difference(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest deviation of an element, relative to the largest element of its parameter."""
    assert ours.keys() == expected.keys()
    return max(float((ours[name].double() - value).abs().max() / value.abs().max()) for name, value in expected.items())


def test_the_gradient_matches_the_formula(tiny_model: Path, payloads: Any, samples: Any, results: dict[str, list[Any]]) -> None:
    (expected,) = _twin(tiny_model, payloads, samples, [list(range(12))])
    names = [name for name in results if not name.startswith("mini") and name not in OTHER_NUMBERS]
    assert {"alone", "four", "offload 1 one", "offload 3 two", "sequence 2", "sequence 2 zero3", "exact 4"} < set(names)
    differences = {
        (name, rank): _largest_difference(result["gradients"][0], expected)
        for name in names
        for rank, result in enumerate(results[name])
    }
    assert max(differences.values()) < 1e-4, differences


def test_results_are_bitwise_equal_on_any_number_of_ranks(results: dict[str, list[Any]]) -> None:
    first, *others = (result for ranks in (1, 2, 4) for result in results[f"exact {ranks}"])
    for other in others:
        for kind in ("gradients", "weights", "metrics", "priorities"):
            assert _bits(other[kind]) == _bits(first[kind]), kind
    plain = [results[f"plain {ranks}"][0]["gradients"][0] for ranks in (1, 2, 4)]
    double = {name: value.double() for name, value in plain[0].items()}
    assert max(_largest_difference(gradient, double) for gradient in plain[1:]) < 2e-6


def _bits(value: Any) -> Any:
    """Return a value that is equal exactly if all tensors and numbers are. Times, which always differ, are omitted."""
    match value:
        case torch.Tensor():
            return value.numpy().tobytes()
        case dict():
            return {name: _bits(item) for name, item in value.items() if not name.startswith("time/")}
        case list():
            return [_bits(item) for item in value]
        case _:
            return value


def test_sequence_parallel_ranks_match_the_gradient_of_one_rank(results: dict[str, list[Any]]) -> None:
    alone = {name: value.double() for name, value in results["plain 1"][0]["gradients"][0].items()}
    for name in ("sequence 2", "sequence 2 zero3", "sequence 4", "sequence 2 data 2"):
        for result in results[name]:
            assert _largest_difference(result["gradients"][0], alone) < 1e-5, name


def test_gradients_add_up_in_fixed_point(results: dict[str, list[Any]]) -> None:
    exact = torch.stack(GRADIENTS).double().sum(0)
    for sums in results["fixed point"]:
        torch.testing.assert_close(sums["in order"].double(), exact, rtol=2.0**-24, atol=2.0**-49)
        assert torch.equal(sums["in order"], sums["one rank"])
        assert torch.equal(sums["in order"], sums["afterwards"])
        assert sums["too large"].isinf().all()
        assert sums["at the bound"].isinf().all(), "an int64 would wrap"
        assert sums["no number"].isinf().all()


def test_only_matrices_decay(results: dict[str, list[Any]]) -> None:
    for stage in range(4):
        for rates in results[f"decay {stage}"]:
            for name, rate in rates.items():
                spared = "norm" in name or "embed_tokens" in name
                assert rate == (0.0 if spared else 0.1), (stage, name)
            assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} < rates.keys()


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


def test_nonfinite_numbers_stop_every_rank(results: dict[str, list[Any]]) -> None:
    for of_reference, of_policy in results["non-finite"]:
        assert "step 0: the loss is nan. The step is not committed" in of_reference
        assert "step 0: the gradient's norm is nan" in of_policy


def test_mini_batch_gradients_match_the_reference(
    tiny_model: Path, payloads: Any, samples: Any, results: dict[str, list[Any]]
) -> None:
    first, second = _twin(tiny_model, payloads, samples, [list(range(6)), list(range(6, 12))])
    for name in (name for name in results if name.startswith("mini")):
        for result in results[name]:
            assert _largest_difference(result["gradients"][0], first) < 1e-4, name
            assert _largest_difference(result["gradients"][1], second) < 2e-3, name


def test_metrics_cover_all_tokens_for_any_layout(payloads: Any, samples: Any, results: dict[str, list[Any]]) -> None:
    planned = sum(sample.trained_tokens for sample in samples)
    for family in (False, True):
        names = [name for name in results if name.startswith("mini") == family and name not in OTHER_NUMBERS]
        metrics = [result["metrics"][0] for name in names for result in results[name]]
        for one in metrics:
            assert one["tokens/train/sum"] + one["excluded/train/tokens"] == planned
            assert one["excluded/train/tokens"] > 0
            for name, value in one.items():
                if not name.startswith(("time/", "flops/")):  # prompts are shared by different responses
                    assert value == pytest.approx(metrics[0][name], rel=1e-3, abs=1e-5), name
    first = results["alone"][0]["metrics"][0]
    assert first["ratio/train/mean"] == 1
    assert first["ratio/train/var"] == 0
    clips = {"clip_low/train/fraction", "clip_high/train/fraction"}
    assert not clips & first.keys(), "a ratio of 1 is never clipped"
    second = results["mini one"][0]["metrics"][0]
    assert second["ratio/train/var"] > 0
    assert clips <= second.keys()


def test_priorities_are_equal_on_every_rank_and_layout(
    tiny_model: Path, payloads: Any, samples: Any, results: dict[str, list[Any]]
) -> None:
    expected = loss_variants.priorities(tiny_model, payloads, samples, low=0.2, high=0.272)
    trained = {name for name in results if name not in OTHER_NUMBERS | NOT_TRAINED}
    for name in trained:
        for result in results[name]:  # in the second mini-batch, tokens moved by the first may differ by one or two
            assert result["priorities"][0] == pytest.approx(expected, rel=0.1 if name.startswith("mini") else 1e-5), name
            assert result["priorities"][0] == results[name][0]["priorities"][0], name
    clipped = [result["priorities"][0] for name in ("clip one", "clip two") for result in results[name]]
    assert all(one == clipped[0] for one in clipped)
    narrow = loss_variants.priorities(tiny_model, payloads, samples, low=0.002, high=0.002)
    assert clipped[0]["0-0"] == pytest.approx(narrow["0-0"]), "its group trains in the first mini-batch, before any update"


@pytest.mark.parametrize("name", loss_variants.VARIANTS)
def test_losses_follow_the_formula_on_any_number_of_ranks(
    tiny_model: Path, payloads: Any, samples: Any, results: dict[str, list[Any]], name: str
) -> None:
    config = loss_variants.VARIANTS[name]
    found = [result[name] for ranks in (1, 2, 4) for result in results[f"losses {ranks}"]]
    expected = loss_variants.gradient(tiny_model, payloads, samples, config)
    for one in found:
        assert _largest_difference(one["gradients"][0], expected) < 1e-4
        for key, value in one["metrics"].items():
            if not key.startswith(("time/", "flops/")):  # more ranks, fewer shared prompts
                assert value == pytest.approx(found[0]["metrics"][key], rel=1e-3, abs=1e-5), key
    metrics = found[0]["metrics"]
    assert not undocumented(metrics)
    assert metrics["logprob_gap/train/mean"] > 0
    if config.from_behaviour(1, 1):
        assert not [name for name in metrics if name.startswith("correction/")], "there is none"
        assert 0 < metrics["clip_low/train/fraction"] + metrics["clip_high/train/fraction"] < 1
    else:
        assert 0 < metrics["correction/train/drop_fraction"] < 1


def test_every_metric_of_a_step_is_documented(results: dict[str, list[Any]]) -> None:
    for name in set(results) - NOT_TRAINED:
        assert not undocumented(results[name][0]["metrics"][0]), name


def test_gradient_norm_and_clipping(tiny_model: Path, results: dict[str, list[Any]]) -> None:
    for name in set(results) - NOT_TRAINED:
        ranks = results[name]
        for result in ranks:
            norms = [float(torch.cat([g.flatten() for g in step.values()]).norm()) for step in result["gradients"]]
            clipped = [min(norm, SECTIONS["optimizer"]["max_grad_norm"]) for norm in norms]
            assert result["metrics"][0]["gradient/train/norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-4), name
            assert result["metrics"][0]["gradient/train/clipped_norm"] == pytest.approx(sum(clipped) / len(clipped)), name


@torch.no_grad()
def test_logprob_gaps_of_every_token_match_the_formula(
    tiny_model: Path, payloads: Any, samples: Any, results: dict[str, list[Any]]
) -> None:
    """The trainer's logprob at the start of the step minus the sampler's, for any layout and with sequence parallelism."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64, attn_implementation="eager")
    expected = {}
    for sample in samples:
        if sample.trained_tokens:
            theta, behaviour = _logprobs(model, payloads, sample)
            sampled = np.ones(len(theta), bool)
            for owner, first, end in payloads[sample.payload].tool_spans.tolist():
                sampled[first:end] &= owner != sample.index
            expected[sample.payload, sample.index] = (theta - behaviour).numpy()[sampled]
    for name in ("alone", "packed", "two", "four", "sequence 2", "mini two"):
        found = {segment: gaps for of_rank in results[name] for segment, gaps in of_rank["gaps"].items()}
        assert found.keys() == {segment for segment, gaps in expected.items() if len(gaps)}
        for segment, gaps in found.items():
            np.testing.assert_allclose(gaps, expected[segment], rtol=0.051, atol=1e-4, err_msg=f"{name} {segment}")


def test_all_ranks_end_with_the_same_weights(results: dict[str, list[Any]]) -> None:
    for name in set(results) - NOT_TRAINED:
        ranks = results[name]
        for result in ranks[1:]:
            assert all(torch.equal(value, ranks[0]["weights"][key]) for key, value in result["weights"].items()), name
