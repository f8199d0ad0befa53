"""A checkpoint resumes with another number of ranks and at another ZeRO stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.runtime.atomic_folders import read_manifest
from services.trainer.checkpoints import exporting
from services.trainer.step import deepspeed_engine as engine
from tests.support.models.rank_worker import Job, launch
from tests.support.models.tiny_model import make_config, make_payloads, make_samples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LAYOUTS: dict[int, list[Any]] = {  # the same samples in the same mini-batches
    1: [[[[[0, 1, 2], [3]]]], [[[[4, 5], [6], [7]]]], [[[[0, 7], [1, 6]]], [[[2, 3, 4, 5]]]]],
    2: [[[[[0, 1], [2]], [[3]]]], [[[[4, 5]], [[6], [7]]]], [[[[0, 7]], [[1, 6]]], [[[2, 3]], [[4], [5]]]]],
    3: [[[[[0, 1]], [[2]], [[3]]]], [[[[4]], [[5]], [[6], [7]]]], [[[[0, 7]], [[1]], [[6]]], [[[2, 3]], [[4]], [[5]]]]],
}
FLOAT, BRAIN = "float32", "bfloat16"
SEED = 5
Origin = tuple[str, int, int]  # type, ranks, ZeRO stage
ORIGINS: list[Origin] = [(FLOAT, 1, 0), (FLOAT, 2, 0), (FLOAT, 2, 2), (FLOAT, 3, 3), (BRAIN, 2, 0), (BRAIN, 2, 3)]
# Origin, ranks, ZeRO stage and whether the optimizer is in host memory, in an order in which they can be run.
TAKEN: list[tuple[Origin, int, int, bool]] = [
    ((FLOAT, 1, 0), 3, 2, False),
    ((FLOAT, 1, 0), 3, 0, False),
    ((FLOAT, 1, 0), 2, 3, False),
    ((FLOAT, 3, 3), 2, 0, False),
    ((FLOAT, 3, 3), 2, 1, False),
    ((FLOAT, 2, 2), 2, 3, True),
    ((BRAIN, 2, 3), 2, 0, False),
    ((BRAIN, 2, 0), 2, 1, True),
    ((FLOAT, 2, 0), 1, 3, False),
    ((FLOAT, 2, 2), 1, 0, False),
    ((FLOAT, 3, 3), 1, 2, True),
    ((BRAIN, 2, 0), 1, 3, False),
    ((BRAIN, 2, 3), 1, 2, False),
]


def _sections(dtype: str, stage: int, offload: bool = False) -> dict[str, Any]:
    return {
        "model": {"dtype": dtype},
        "trainer": {"row_tokens": 128, "zero_stage": stage, "offload": offload, "deterministic": True},
        "reference": {"alpha": 0.3},
        "run": {"steps": 4, "seed": SEED},
    }


@pytest.fixture(scope="module")
def results(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[Any]]:
    """Return the results of every job, one per rank."""
    folder = tmp_path_factory.mktemp("layouts")
    payloads = make_payloads(groups=2, size=4)
    arguments = {"model": tiny_model, "payloads": payloads, "samples": make_samples(payloads)}
    found: dict[Any, list[Any]] = {}
    for turn, size in enumerate((1, 3, 2, 1)):
        jobs: dict[Any, Job] = {}
        for origin in ORIGINS if turn < 3 else ():
            dtype, ranks, stage = origin
            if ranks == size:
                own = {"sections": _sections(dtype, stage), "layouts": LAYOUTS[size], "root": folder / f"{dtype}-{ranks}-{stage}"}
                jobs[origin] = ("resume", arguments | own)
        for taken in TAKEN:
            (dtype, ranks, stage), by, at, offload = taken
            if by == size and (turn == 3) == (by == 1):
                own = {"sections": _sections(dtype, at, offload), "layout": LAYOUTS[size][-1]}
                jobs[taken] = ("take up", arguments | own | {"root": folder / f"{dtype}-{ranks}-{stage}"})
        found |= dict(zip(jobs, launch(size, list(jobs.values()), folder / f"ranks-{turn}"), strict=True))
    return found


def _named(taken: Any) -> str:
    (dtype, ranks, stage), by, at, offload = taken
    return f"{dtype}: {ranks} at {stage} by {by} at {at}{' offload' if offload else ''}"


@pytest.mark.parametrize("taken", TAKEN, ids=_named)
def test_restored_state_equals_the_saved_state(taken: Any, results: dict[Any, list[Any]]) -> None:
    saved = results[taken[0]][0]["state"]
    for result in results[taken]:
        state = result["state"]
        assert state["steps"] == saved["steps"] == {2.0}
        for name, kinds in saved["trained"].items():
            for kind, before, after in zip(("weights", "exp_avg", "exp_avg_sq"), kinds, state["trained"][name], strict=True):
                assert before.dtype == after.dtype == torch.float32
                assert before.count_nonzero() > 0
                assert torch.equal(before, after), (name, kind)
        for which in ("weights", "reference"):
            for name, value in saved[which].items():
                assert torch.equal(value, state[which][name]), (which, name)


@pytest.mark.parametrize("taken", TAKEN, ids=_named)
def test_training_continues_as_if_uninterrupted(taken: Any, results: dict[Any, list[Any]]) -> None:
    (dtype, *_), by, *_ = taken
    origin = results[taken[0]][0]
    # Gradients are summed in another order, so in bfloat16 a weight at a rounding boundary may be rounded the other way.
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6} if dtype == FLOAT else {"rtol": 0.02, "atol": 2e-3}
    for result in results[taken]:
        for name in ("loss/train/sum", "policy_loss/train/mean", "kl/train/mean", "gradient/train/norm"):
            torch.testing.assert_close(result["metrics"][name], origin["metrics"][0][name], **close)
        for name, value in origin["uninterrupted"][0].items():
            torch.testing.assert_close(result["after"][name], value, **close)
    assert len(results[taken]) == by


@pytest.mark.parametrize("origin", ORIGINS, ids=str)
def test_a_checkpoint_is_exported_without_ranks(
    origin: Origin, results: dict[Any, list[Any]], tiny_model: Path, tmp_path: Path
) -> None:
    """The result is bitwise what the ranks that wrote the checkpoint would have exported."""
    dtype, _, stage = origin
    saved = results[origin][0]["saved"]
    config = make_config(tiny_model, **_sections(dtype, stage))
    (other := tmp_path / "export.0.partial").mkdir()
    assert exporting.write(config, saved.folder.parent, saved.step, tmp_path / "export").step == saved.step
    assert other.exists(), "another process may be writing it"
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=getattr(torch, dtype)).state_dict()
    expected = results[origin][0]["state"]["weights"]
    assert weights.keys() == expected.keys()
    assert all(torch.equal(value, weights[name]) for name, value in expected.items())
    assert read_manifest(tmp_path / "export").facts["dtype"] == dtype


def test_common_ranks_keep_their_rng_and_new_ones_get_their_own(results: dict[Any, list[Any]]) -> None:
    of_three = results[(FLOAT, 1, 0), 3, 2, False]
    assert torch.equal(of_three[0]["random"], results[(FLOAT, 1, 0), 3, 0, False][0]["random"])
    expected = [torch.rand(3, generator=torch.Generator().manual_seed(engine.seed_of_rank(SEED, rank))) for rank in (1, 2)]
    assert [one["random"].tolist() for one in of_three[1:]] == [numbers.tolist() for numbers in expected]
    assert not torch.equal(*expected)
