"""How a trainer resumes a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.config import RunConfig
from services.protocol import codec
from services.protocol.messages import StepPlan
from services.store.records import RunState
from services.trainer.checkpoints.resume import Attach, NoWay, Restore, choose, trainable, wanted
from tests.support.harness import small_config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return small_config(tmp_path_factory.mktemp("run"), None, "trainer.ranks=2")


def state(committed: int, **fields: Any) -> RunState:
    known = {"checkpointed_step": -1, "retired_step": -1} | fields
    checkpointed = known.pop("checkpointed_step")
    done = committed + 1
    return RunState(100, 16, 0, 40, done, done, committed, checkpointed, "", {}, "", "", "data", "config", **known)


def plan(step: int, ranks: int = 2, row_tokens: int = 256) -> StepPlan:
    return StepPlan(step, [], [], ranks, 1, [1], [1.0], 1, 1, {}, row_tokens)


@pytest.mark.parametrize(
    ("given", "step", "way"),
    [
        (state(-1), -1, Attach("Redis knows every step up to -1")),
        (state(3), -1, Attach("Redis knows every step up to 3; retraining 4 steps")),
        (state(7, checkpointed_step=5, retired_step=5), 5, Attach("Redis knows every step up to 7; retraining 2 steps")),
        (state(5, checkpointed_step=5, retired_step=4), 5, Attach("Redis knows every step up to 5")),
        (state(4), 5, Restore("Redis has committed steps only up to 4; later ones were lost")),
        (state(-1), 5, Restore("Redis has committed steps only up to -1; later ones were lost")),
        (state(9, restore=5, checkpointed_step=9, retired_step=9), 5, Restore("step 5 was requested")),
        (state(9, restore=5, restore_why="ada: spike", checkpointed_step=9), 5, Restore("step 5 was requested by ada: spike")),
        (state(-1, restoring=5), 5, Restore("a restore to step 5 was interrupted")),
        (state(0, checkpointed_step=0, retired_step=0), 0, Attach("Redis knows every step up to 0")),
        (state(3, restore=0, checkpointed_step=3), 0, Restore("step 0 was requested")),
        (state(3, restoring=0, checkpointed_step=3), 0, Restore("a restore to step 0 was interrupted")),
    ],
)
def test_the_way_to_resume_depends_on_what_redis_has(
    config: RunConfig, given: RunState, step: int, way: Attach | Restore
) -> None:
    assert choose(given, step, [plan(step + 1)], config) == way


def test_a_checkpoint_older_than_the_plans_restores_the_run(config: RunConfig) -> None:
    way = choose(state(9, checkpointed_step=8, retired_step=8), 5, [], config)
    assert way == Restore("Redis has no plans between this checkpoint and that of step 8, which is gone")


def test_plans_for_other_ranks_or_row_lengths_are_replanned(config: RunConfig) -> None:
    for unfit, step in ((plan(6, ranks=1), 5), (plan(6, row_tokens=512), 5), (plan(1, ranks=1), 0)):
        way = choose(state(step + 1), step, [unfit], config)
        assert isinstance(way, Restore)
        planned = f"planned for {unfit.ranks} ranks with rows of {unfit.row_tokens} tokens, not 2 ranks with rows of 256"
        assert planned in way.why
        assert not trainable(codec.encode(unfit), config)
        with pytest.raises(NoWay, match=f"{planned} tokens, and there is no checkpoint: set it back"):
            choose(state(6), -1, [unfit], config)
    assert trainable(codec.encode(plan(6, row_tokens=128)), config)
    assert not trainable(b"damaged", config)


def test_an_unmounted_volume_does_not_restart_the_run(config: RunConfig) -> None:
    for step in (5, 0):
        for given in (state(7, checkpointed_step=step), state(-1, restoring=step), state(-1, restore=step)):
            with pytest.raises(NoWay, match=f"has a checkpoint of step {step}, but its folder is empty: mount the volume"):
                choose(given, -1, [], config)


def test_a_new_request_precedes_an_unfinished_restore() -> None:
    assert wanted(state(9, restoring=3, restore=5)) == 5
    assert wanted(state(9, restoring=3, restore=0)) == 0
    assert wanted(state(9, restore=5)) == 5
    assert wanted(state(9)) == -1


def test_placement_may_change_in_a_runs_folder(tmp_path: Path) -> None:
    from services.config import digest

    here = small_config(tmp_path)
    for same in ("trainer.ranks=2", "trainer.zero_stage=2", "generator.count=3", "checkpoint.every_steps=1", "run.steps=5"):
        assert digest(small_config(tmp_path, None, same)) == digest(here)
    for other in ("trainer.mini_batches=2", "run.seed=5", "sampling.temperature=0.5", "generator.engine_options.token_s=0.1"):
        assert digest(small_config(tmp_path, None, other)) != digest(here)
