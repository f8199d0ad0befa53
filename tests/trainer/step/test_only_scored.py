"""Rows whose tokens all have advantage 0 get no backward pass, and nothing else changes: on real DeepSpeed ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.support.models.rank_worker import Job, launch
from tests.support.models.tiny_model import make_payloads, make_samples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

EQUAL = range(4, 8)
"""The samples of the second of three groups, whose rewards are all equal."""
NEGLIGIBLE = 1e-30
"""Coefficient of an entropy bonus that changes no float32 gradient, but gives every token one."""
LAYOUTS: dict[str, tuple[int, Any, int, dict[str, Any]]] = {  # ranks, layout, backward passes of a rank, section trainer
    "one": (1, [[[[4, 5, 6, 7], [0, 1, 2, 3], [8, 9, 10, 11]]]], 2, {}),
    "in between": (1, [[[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]]], 2, {"gradient_checkpointing": True}),
    "exact": (1, [[[[4, 5, 6, 7], [0, 1, 2, 3], [8, 9, 10, 11]]]], 2, {"deterministic": True}),
    "mini-batch of nothing": (1, [[[[4, 5], [6, 7]]], [[[0, 1, 2, 3], [8, 9, 10, 11]]]], 3, {}),
    "two": (2, [[[[4, 5], [0, 1, 2, 3]], [[6, 7], [8, 9, 10, 11]]]], 1, {}),
    "zero2": (2, [[[[4, 5], [0, 1, 2, 3]], [[6, 7], [8, 9, 10, 11]]]], 1, {"zero_stage": 2}),
    "zero3": (2, [[[[4, 5], [0, 1, 2, 3]], [[6, 7], [8, 9, 10, 11]]]], 1, {"zero_stage": 3}),
    "zero3, other rank": (2, [[[[4, 5, 6, 7], [0, 1, 2, 3]], [[8, 9], [10, 11]]]], 2, {"zero_stage": 3}),
    "sequence": (2, [[[[4, 5, 6, 7], [0, 1, 2, 3], [8, 9, 10, 11]]]], 2, {"sequence_parallel": 2}),
}


@pytest.fixture(scope="module")
def results(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[Any], list[Any]]]:
    """Return, by layout, the results of each rank: as configured, and with a gradient for every token."""
    payloads = make_payloads(groups=3, size=4)
    samples = make_samples(payloads, [2, 9], [0.5, 1.0, 1.0])
    samples = [msgspec.structs.replace(one, advantage=0.0) if i in EQUAL else one for i, one in enumerate(samples)]

    def job(name: str, entropy: float) -> Job:
        _, layout, _, trainer = LAYOUTS[name]
        sections = {
            "trainer": {"row_tokens": 128} | trainer,
            "model": {"path": str(tiny_model), "dtype": "float32", "max_tokens": 256},
            "loss": {"kl_beta": 0.0, "correction_upper": 1.99, "entropy_coefficient": entropy},
            "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.5},
            "replay": {"sampler": "prioritized", "priority": "trainer", "max_uses": 2},
        }
        given = {"model": tiny_model, "sections": sections, "payloads": payloads, "samples": samples}
        return "train", given | {"layouts": [layout, layout]}

    found: dict[str, tuple[list[Any], list[Any]]] = {}
    for size in (1, 2):
        names = [name for name, (ranks, *_) in LAYOUTS.items() if ranks == size]
        jobs = [job(name, entropy) for name in names for entropy in (0.0, NEGLIGIBLE)]
        outcome = launch(size, jobs, tmp_path_factory.mktemp("ranks") / str(size))
        found |= {name: (outcome[2 * i], outcome[2 * i + 1]) for i, name in enumerate(names)}
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_row_without_a_gradient_is_only_scored(name: str, results: dict[str, tuple[list[Any], list[Any]]]) -> None:
    _, layout, passes, _ = LAYOUTS[name]
    rows = sum(len(of_rank) for of_rank in (mini_batch[0] for mini_batch in layout))
    for ours, every in zip(*results[name], strict=True):
        assert (ours["backward_passes"], every["backward_passes"]) == (2 * passes, 2 * rows)
        for kind in ("gradients", "weights"):
            torch.testing.assert_close(ours[kind], every[kind], rtol=1e-5, atol=1e-8)
        assert ours["priorities"] == every["priorities"]
        assert ours["gaps"].keys() == every["gaps"].keys()
        for one, other in zip(ours["metrics"], every["metrics"], strict=True):
            left_out = {name for name in one if name.startswith(("time/", "flops/"))}
            assert one.keys() == other.keys()
            assert {key: one[key] for key in one.keys() - left_out} == pytest.approx(
                {key: other[key] for key in other.keys() - left_out}, rel=1e-5, abs=1e-7
            )
            assert (one["flops/train/sum"] < other["flops/train/sum"]) == (passes < rows)
