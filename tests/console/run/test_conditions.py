"""The condition of a run, read from its folder without starting anything or reporting outdated facts."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.console.lock import FolderLock
from services.console.run.folder import RunFolder
from services.operations.condition import Condition

PAUSED = Condition("paused", "trainer by ada: lunch")
KILLED = Condition("stopped", "grpo run was killed")


@pytest.mark.parametrize(
    ("noted", "running", "stopped"),
    [
        (None, Condition("running"), Condition("stopped")),
        (Condition("running"), Condition("running"), KILLED),
        (PAUSED, PAUSED, KILLED),
        (Condition("stopped"), Condition("running"), Condition("stopped")),
        (Condition("failed", "no space"), Condition("running"), Condition("failed", "no space")),
        (Condition("finished", "trained 4 of 4 steps"), Condition("running"), Condition("finished", "trained 4 of 4 steps")),
    ],
)
def test_a_noted_condition_is_ignored_once_outdated(
    tmp_path: Path, noted: Condition | None, running: Condition, stopped: Condition
) -> None:
    folder = RunFolder(tmp_path)
    if noted is not None:
        folder.note(noted)
    with FolderLock(tmp_path):
        assert folder.condition_now() == running
    assert folder.condition_now() == stopped
    with FolderLock(tmp_path, readers=True):
        assert folder.condition_now() == stopped, "a reader does not count as running it"
