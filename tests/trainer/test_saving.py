"""When the trainer saves, and how a failed checkpoint affects the run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.runtime.loops import Broken
from services.trainer.saving import Saving
from tests.support.harness import small_config

MIB = 2**20


class Noted:
    """Records what is done; every call to Redis succeeds, and ranks write a checkpoint or report a `problem`."""

    def __init__(self, folder: Path, problem: str = "") -> None:
        self.problem, self.did, self.memory, self.committed = problem, list[str](), (50 * MIB, 0), -1
        store: Any = SimpleNamespace(
            steps=SimpleNamespace(checkpointed=lambda fence, step: self.did.append(f"whole {step}"), retire=lambda: None),
            run=SimpleNamespace(checkpoint_failed=lambda why, fence: self.did.append(why), memory=lambda: self.memory),
        )
        commands: Any = SimpleNamespace(lead=self._lead)
        config = small_config(folder, None, "run.steps=20", "checkpoint.every_steps=4")
        recovery: Any = SimpleNamespace(
            config=config,
            store=store,
            fence=7,
            commands=commands,
            call=lambda done: done,
            stay_in_step=lambda step: SimpleNamespace(committed_step=max(step, self.committed)),
            saved=lambda: self.did.append("covered"),
        )
        self.saving = Saving(recovery, lambda **_: None)

    def _lead(self, name: str, step: int) -> str:
        self.did.append(f"{name} {step}")
        return self.problem


def test_a_failed_save_is_fatal_only_if_it_was_the_last_chance(tmp_path: Path) -> None:
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


def test_a_request_is_tried_once_and_met_by_any_save(tmp_path: Path) -> None:
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


def test_a_due_checkpoint_is_tried_once(tmp_path: Path) -> None:
    noted = Noted(tmp_path, "disk full")
    for step in (2, 3, 3, 4):
        noted.saving.save_if_due(step)
    assert noted.did == ["save 3", "step 3, attempt 1: disk full"]
    noted.saving.save_if_due(7)
    assert noted.did[2] == "save 7"


def test_what_a_step_has_to_record_comes_before_its_checkpoint(tmp_path: Path) -> None:
    """A trainer that dies after the checkpoint is followed by one that does not train the step again."""
    noted = Noted(tmp_path)
    noted.saving.before = lambda: noted.did.append("recorded")
    noted.saving.save(4)
    noted.saving.save(4)
    assert noted.did == ["recorded", "save 4", "covered", "whole 4"]


def test_nothing_is_saved_before_the_first_step(tmp_path: Path) -> None:
    noted = Noted(tmp_path)
    noted.saving.save_if_requested(SimpleNamespace(checkpoint="17 too early"), -1)  # type: ignore[arg-type]
    noted.saving.save_if_due(-1)
    noted.saving.save(-1)
    assert noted.did == []


def test_weights_behind_the_committed_step_are_not_saved(tmp_path: Path) -> None:
    noted = Noted(tmp_path)
    noted.committed = 3
    noted.saving.save(2)
    assert (noted.did, noted.saving.last) == ([], -1)
    noted.saving.save(3)
    assert noted.did[0] == "save 3"


def test_checkpoints_are_periodic_and_early_if_redis_is_full(tmp_path: Path) -> None:
    noted = Noted(tmp_path)
    saving = noted.saving
    assert [step for step in range(20) if saving.due(step)] == [3, 7, 11, 15], "the last one is written at the end"
    seen: list[list[str]] = []
    for step, used in ((4, 69), (5, 71), (5, 95), (6, 95), (7, 69), (8, 71)):
        noted.memory = (used * MIB, 100 * MIB)
        noted.did.clear()
        saving.save_if_redis_is_nearly_full(step)
        seen.append(noted.did[:1])
    assert seen == [[], ["save 5"], [], [], [], ["save 8"]], "no second early save until memory has dropped"
