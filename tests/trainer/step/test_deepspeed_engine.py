"""DeepSpeed's settings and optimizer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.config.training import Optimizer
from services.trainer.model import policy_network as model
from services.trainer.step import deepspeed_engine as engine
from tests.support.models.tiny_model import make_config, make_model


def test_a_tied_embedding_does_not_decay(tmp_path: Path) -> None:
    config = make_config(make_model(tmp_path, tied=True), optimizer={"weight_decay": 0.1, "betas": [0.9, 0.9]})
    scorer = model.load(config.model, 1.0, 8)
    decayed, spared = engine.adamw(config, scorer).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"], decayed["betas"]) == (0.1, 0.0, (0.9, 0.9))
    assert {parameter.ndim for parameter in decayed["params"]} == {2}
    assert [parameter is scorer.model.lm_head.weight for parameter in spared["params"] if parameter.ndim == 2] == [True]
    assert len(decayed["params"]) + len(spared["params"]) == len(list(scorer.parameters()))


@pytest.mark.parametrize(
    ("stage", "dtype", "runs_as", "clipping"),
    [(0, "float32", 0, 0.0), (0, "bfloat16", 1, 0.5), (1, "float32", 1, 0.5), (3, "bfloat16", 3, 0.5)],
)
def test_settings_depend_on_stage_and_dtype(tiny_model: Path, stage: int, dtype: str, runs_as: int, clipping: float) -> None:
    config = make_config(tiny_model, trainer={"zero_stage": stage}, model={"dtype": dtype}, optimizer={"max_grad_norm": 0.5})
    tree = engine.settings(config, model.load(config.model, 1.0, 8))
    assert tree["zero_optimization"]["stage"] == runs_as
    assert tree["gradient_clipping"] == clipping  # 0: the policy clips itself
    assert ("bf16" in tree) == (dtype == "bfloat16")


@pytest.mark.parametrize(("step", "expected"), [(0, 0.25), (2, 0.75), (3, 1.0), (100, 1.0)])
def test_warm_up_is_linear_and_never_zero(step: int, expected: float, tiny_model: Path) -> None:
    config = make_config(tiny_model, optimizer={"learning_rate": 1.0, "warmup_steps": 4})
    assert engine.LearningRate(config.optimizer, 101).at(step) == expected


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("linear", 0, [0.775, 0.55, 0.325, 0.1]),
        ("linear", 2, [0.5, 1.0, 0.55, 0.1]),
        ("cosine", 0, [0.1 + 0.45 * (1 + 0.5**0.5), 0.55, 0.1 + 0.45 * (1 - 0.5**0.5), 0.1]),
        ("cosine", 2, [0.5, 1.0, 0.55, 0.1]),
    ],
)
def test_the_learning_rate_decays_to_the_final_fraction(schedule: str, warmup: int, expected: list[float]) -> None:
    options = Optimizer(learning_rate=2.0, schedule=schedule, warmup_steps=warmup)  # pyright: ignore
    rate = engine.LearningRate(options, 4)
    rates = [rate.at(step) for step in range(4)]
    assert rates == pytest.approx([2.0 * value for value in expected])
    assert rate.at(9) == rates[-1]  # steps past the last keep the final rate


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_learning_rate_never_rises_when_a_run_is_extended(schedule: str) -> None:
    options = Optimizer(learning_rate=1e-5, schedule=schedule, warmup_steps=2)  # pyright: ignore
    first, longer = engine.LearningRate(options, 10), engine.LearningRate(options, 20)
    rates = [first.at(step) for step in range(8)]
    longer.continue_from(first.state)
    rates += [longer.at(step) for step in range(8, 20)]
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[8] == rates[7], "held where the shorter schedule was"
    assert rates[-1] == pytest.approx(1e-6)


@pytest.mark.parametrize("change", [{"learning_rate": 2e-5}, {"schedule": "cosine"}])
def test_another_peak_or_schedule_begins_where_it_would_be(change: dict[str, Any]) -> None:
    options = Optimizer(learning_rate=1e-5, schedule="linear")
    first = engine.LearningRate(options, 10)
    first.at(9)
    changed = options.model_copy(update=change)
    asked, alone = engine.LearningRate(changed, 20), engine.LearningRate(changed, 20)
    asked.continue_from(first.state)
    assert asked.at(10) == alone.at(10)


def test_random_state_is_restored() -> None:
    engine.seed(5, deterministic=False)
    state = engine.random_state()
    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    engine.set_random_state(state)
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == drawn
