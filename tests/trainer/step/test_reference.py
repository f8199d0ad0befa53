"""The averaged reference against a plain loop in float64, on real DeepSpeed ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.rank_worker import Job, launch
from tests.support.models.tiny_model import make_payloads, make_samples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LAYOUTS = [[[[[0, 1], [2]], [[3]]]], [[[[4]], [[5, 6, 7]]]], [[[[0, 7]], [[1, 6]]]], [[[[5]], [[2, 3]]]]]
TRAINERS: dict[str, dict[str, Any]] = {
    "zero0": {"zero_stage": 0},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "zero3 offload": {"zero_stage": 3, "offload": True},
    "bfloat16 zero3": {"zero_stage": 3},
    "at once": {"zero_stage": 3},
}


@pytest.fixture(scope="module")
def results(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    payloads = make_payloads(groups=2, size=4)
    samples = make_samples(payloads)
    given = {"model": tiny_model, "payloads": payloads, "samples": samples}
    jobs: dict[str, Job] = {}
    for name, trainer in TRAINERS.items():
        sections: dict[str, Any] = {
            "trainer": {"row_tokens": 128} | trainer,
            "reference": {"alpha": 1.0 if name == "at once" else 0.3},
            "optimizer": {"learning_rate": 1e-2},
            "model": {"dtype": "bfloat16" if name.startswith("bfloat16") else "float32"},
        }
        jobs[name] = "polyak", given | {"sections": sections, "layouts": LAYOUTS}
    folder = tmp_path_factory.mktemp("reference")
    jobs["late"] = "late average", given | {"layout": LAYOUTS[0], "root": folder / "late"}
    return dict(zip(jobs, launch(2, list(jobs.values()), folder / "ranks"), strict=True))


@pytest.mark.parametrize("name", [name for name in TRAINERS if name != "at once"])
def test_the_reference_matches_the_averaging_formula(name: str, results: dict[str, list[Any]]) -> None:
    tolerance = 2.0**-8 if name.startswith("bfloat16") else 1e-6
    for result in results[name]:
        expected = {key: value.double() for key, value in result["references"][0].items()}
        assert all(torch.equal(result["weights"][0][key].double(), value) for key, value in expected.items())
        for step in range(len(LAYOUTS)):
            policy = result["weights"][step + 1]
            expected = {key: 0.7 * value + 0.3 * policy[key].double() for key, value in expected.items()}
            for key, value in expected.items():
                torch.testing.assert_close(
                    result["references"][step + 1][key].double(), value, rtol=tolerance, atol=tolerance / 10
                )
        moved = (result["references"][-1][key] - result["references"][0][key] for key in expected)
        assert max(float(change.abs().max()) for change in moved) > 1e-3


def test_the_new_reference_is_used_for_scoring(results: dict[str, list[Any]]) -> None:
    for at_once, slow in zip(results["at once"], results["zero3"], strict=True):
        assert all(metrics["kl/train/mean"] < 1e-9 for metrics in at_once["metrics"])
        assert slow["metrics"][1]["kl/train/mean"] > 1e-6


def test_an_average_missing_from_the_checkpoint_is_reset(results: dict[str, list[Any]]) -> None:
    for result in results["late"]:
        assert all(torch.equal(result["after"][name], value) for name, value in result["before"].items())
    (warning,) = results["late"][0]["warned"]
    assert "has no averaged reference: starting the average from model.path" in warning
