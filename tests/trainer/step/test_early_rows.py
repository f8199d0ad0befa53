"""A step leaves the same bits whether or not some of its rows were trained on before it was complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from services.trainer.step import plan_check
from tests.support.models.rank_worker import Job, launch
from tests.support.models.tiny_model import make_config, make_payloads, make_samples, plan_of

ONE: Any = [[[[3, 1], [0, 2], [5, 4], [7, 6], [11], [9, 10, 8]]]]
TWO: Any = [[[[3, 1], [0, 2], [5, 4]], [[11], [7, 6], [9, 10, 8]]]]
EMPTY: Any = [[[[3, 1], [0, 2], [5, 4], [11, 7, 6, 9, 10, 8], []]]]
"""The last row is empty, as after a step whose groups were all in early parts."""
BY_ROW: dict[str, Any] = {"replay": {"max_uses": 2}}
"""Such a run trains no rows early, and divides the loss of each row."""
STEPS = 2

of_size: dict[int, dict[str, tuple[Any, dict[str, Any], list[int]]]] = {
    1: {
        "float32": (ONE, {}, [1, 2]),
        "all but one": (ONE, {}, [5]),
        "an empty last row": (EMPTY, {}, [4]),
        "bfloat16": (ONE, {"model": {"dtype": "bfloat16"}}, [2]),
        "bfloat16 stage 2": (ONE, {"model": {"dtype": "bfloat16"}, "trainer": {"zero_stage": 2}}, [2]),
        "offload": (ONE, {"trainer": {"zero_stage": 2, "offload": True}}, [3]),
        "reference": (ONE, {"loss": {"kl_beta": 0.1}}, [1, 1, 1]),
        "sequence": (ONE, {"loss": {"denominator": "sequence"}}, [2, 2]),
        "group": (ONE, {"loss": {"denominator": "group"}}, [2, 2]),
        "adapters": (ONE, {"lora": {"rank": 4}}, [2]),
        "adapters stage 2": (ONE, {"lora": {"rank": 4}, "trainer": {"zero_stage": 2}}, [2]),
    },
    2: {
        "two ranks": (TWO, {}, [1]),
        "stage 3 with offload": (TWO, {"trainer": {"zero_stage": 3, "offload": True}}, [1, 1]),
        **{f"stage {stage}": (TWO, {"trainer": {"zero_stage": stage}}, [1, 1]) for stage in (1, 2, 3)},
    },
}
CASES = [name for jobs in of_size.values() for name in jobs]


@pytest.fixture(scope="module")
def results(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], list[Any]]:
    """Return the results by case and whether rows were trained on early, one per rank."""
    payloads = make_payloads(groups=3, size=4)
    for payload in payloads.values():
        payload.logprobs[::9] = np.nan
    samples = make_samples(payloads, [2, 7])

    def job(layout: Any, sections: dict[str, Any], early: list[int], by_row: bool = False) -> Job:
        given = {name: dict(values) for name, values in sections.items()}
        given["trainer"] = {"row_tokens": 128, "step_timeout_s": 60.0} | given.get("trainer", {})
        given["model"] = {"path": str(tiny_model), "dtype": "float32", "max_tokens": 256} | given.get("model", {})
        given["optimizer"] = {"learning_rate": 1e-3, "max_grad_norm": 0.5}
        given |= BY_ROW if by_row else {}
        assert make_config(tiny_model, **given).trains_early != by_row
        return "train", {
            "model": tiny_model, "sections": given, "payloads": payloads, "samples": samples, "layouts": [layout] * STEPS,
            "early": early,
        }  # fmt: skip

    found: dict[tuple[str, bool], list[Any]] = {}
    for size, cases in of_size.items():
        jobs = {
            (name, early): job(layout, sections, parts if early else [])
            for name, (layout, sections, parts) in cases.items()
            for early in (True, False)
        }
        jobs |= {("by row", False): job(ONE, {}, [], by_row=True)} if size == 1 else {}
        outcome = launch(size, list(jobs.values()), tmp_path_factory.mktemp("ranks") / str(size))
        found |= dict(zip(jobs, outcome, strict=True))
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", CASES)
def test_early_rows_leave_the_same_bits(results: dict[tuple[str, bool], list[Any]], name: str) -> None:
    for early, whole in zip(results[name, True], results[name, False], strict=True):
        assert early["weights"].keys() == whole["weights"].keys()
        assert all(torch.equal(weight, whole["weights"][key]) for key, weight in early["weights"].items())
        assert any(torch.count_nonzero(gradient) for gradient in whole["gradients"][0].values())
        assert _same(early["gaps"], whole["gaps"])
        for of_early, of_whole in zip(early["metrics"], whole["metrics"], strict=True):
            assert {key for key in of_early if not key.startswith("time/") and of_early[key] != of_whole[key]} == set()
            assert of_early["time/train/total_s"] >= of_early["time/train/forward_s"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(("reference", "sequence", "group", "adapters"))])
def test_dividing_the_gradient_last_is_dividing_the_loss_of_every_row(
    results: dict[tuple[str, bool], list[Any]], name: str
) -> None:
    rounded = name.startswith("bfloat16")
    (expected,) = results["by row", False]
    for result in results[name, True]:
        for step in range(1 if rounded else STEPS):
            for metric in ("loss/train/sum", "gradient/train/norm", "gradient/train/clipped_norm"):
                value = expected["metrics"][step][metric]
                assert result["metrics"][step][metric] == pytest.approx(value, rel=0.1 if rounded else 1e-4), metric
            for key, gradient in expected["gradients"][step].items():
                largest = (0.1 if rounded else 1e-4) * gradient.abs().max()
                assert (result["gradients"][step][key] - gradient).abs().max() <= largest, key
        for key, weight in expected["weights"].items():
            torch.testing.assert_close(result["weights"][key], weight, rtol=0, atol=0.02 if rounded else 1e-5, check_dtype=False)


def _same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(value, other[key], equal_nan=True) for key, value in one.items())


def test_a_plan_that_ends_with_an_early_row_is_refused(tiny_model: Path) -> None:
    samples = make_samples(make_payloads(groups=3, size=4), [])
    config, (plan, _) = make_config(tiny_model), plan_of(ONE, samples)
    assert plan_check.fault(plan, 2, 4, config) == plan_check.fault(plan, 6, 0, config) == ""
    assert "there are 7 rows" in plan_check.fault(plan, 3, 4, config)
    assert "6 rows were trained on early, but it has 0 others" in plan_check.fault(plan, 0, 6, config)
    two = msgspec.structs.replace(plan, mini_batch_rows=[3, 3], denominators=[1.0, 1.0])
    assert "not one mini-batch that ends with another row" in plan_check.fault(two, 2, 4, config)
    assert plan_check.fault(two, 6, 0, config) == ""
