"""When the trainer saves, and what a checkpoint that cannot be written does to the run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.runtime.loops import Broken
from services.trainer.checkpoints.saving import Saving
from tests.support.harness import small_config

MIB = 2**20


class Noted:
    """Every call to Redis succeeds, and what is done is noted; ranks write, or have a `problem`."""

    def __init__(self, folder: Path, problem: str = "") -> None:
        self.problem, self.did, self.memory, self.committed = problem, list[str](), (50 * MIB, 0), -1
        store: Any = SimpleNamespace(
            steps=SimpleNamespace(checkpointed=lambda fence, step: self.did.append(f"whole {step}"), retire=lambda: None),
            run=SimpleNamespace(checkpoint_failed=lambda why, fence: self.did.append(why), memory=lambda limit: self.memory),
        )
        commands: Any = SimpleNamespace(lead=self._lead)
        config = small_config(folder, None, "run.steps=20", "checkpoint.every_steps=4")
        recovery: Any = SimpleNamespace(
            stay_in_step=lambda step: SimpleNamespace(committed_step=max(step, self.committed)),
            saved=lambda: self.did.append("covered"),
        )
        self.saving = Saving(config, store, 7, commands, recovery, lambda done: done, lambda **_: None)

    def _lead(self, name: str, step: int) -> str:
        self.did.append(f"{name} {step}")
        return self.problem


def test_one_that_fails_is_told_and_kills_only_what_has_no_later_chance(tmp_path: Path) -> None:
    noted = Noted(tmp_path, "disk full")
    saving = noted.saving
    saving.save(4, must=False)
    assert (saving.last, saving.failed) == (-1, 1)
    with pytest.raises(Broken, match="disk full"):
        saving.save(4)
    assert noted.did == ["save 4", "step 4, attempt 1: disk full", "save 4", "step 4, attempt 2: disk full"]
    noted.problem = ""
    saving.save(4)
    assert (saving.last, saving.failed) == (4, 0)
    assert noted.did[4:] == ["save 4", "covered", "whole 4"]


def test_a_request_is_seen_to_once_and_ended_by_what_is_saved(tmp_path: Path) -> None:
    noted, request = Noted(tmp_path, "disk full"), SimpleNamespace(checkpoint="17 by hand")
    save: Any = noted.saving.save_if_requested
    save(SimpleNamespace(checkpoint=""), 4)
    assert noted.did == []
    for _ in range(3):
        save(request, 4)
    assert noted.did == ["save 4", "step 4, attempt 1: disk full"]
    noted.problem = ""
    save(SimpleNamespace(checkpoint="18 again"), 4)
    save(SimpleNamespace(checkpoint="19 there is one"), 4)
    assert noted.did[2:] == ["save 4", "covered", "whole 4", "whole 4"]


def test_nothing_is_saved_before_anything_is_trained(tmp_path: Path) -> None:
    noted = Noted(tmp_path)
    noted.saving.save_if_requested(SimpleNamespace(checkpoint="17 too early"), -1)  # type: ignore[arg-type]
    noted.saving.save(-1)
    assert noted.did == []


def test_a_trainer_stopped_while_it_trains_steps_again_saves_no_weights_beside_a_later_state(tmp_path: Path) -> None:
    noted = Noted(tmp_path)
    noted.committed = 3
    noted.saving.save(2)
    assert (noted.did, noted.saving.last) == ([], -1)
    noted.saving.save(3)
    assert noted.did[0] == "save 3"


def test_one_is_due_every_so_many_steps_and_early_once_when_redis_is_nearly_full(tmp_path: Path) -> None:
    noted = Noted(tmp_path)
    saving = noted.saving
    assert [step for step in range(20) if saving.due(step)] == [3, 7, 11, 15], "the last is written at the end anyway"
    seen: list[list[str]] = []
    for step, used in ((4, 69), (5, 71), (5, 95), (6, 95), (7, 69), (8, 71)):
        noted.memory = (used * MIB, 100 * MIB)
        noted.did.clear()
        saving.save_if_redis_is_nearly_full(step)
        seen.append(noted.did[:1])
    assert seen == [[], ["save 5"], [], [], [], ["save 8"]], "what fills it is not what checkpoints cover, until it falls"
