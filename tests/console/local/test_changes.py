"""What may change when a run is resumed, and that it is recorded."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from services.config import digest
from services.console.errors import ConsoleError
from services.console.local.changes import changes, in_words, record
from services.console.local.folder import RunFolder
from tests.support.harness import small_config


@pytest.mark.parametrize("override", ["run.steps=9", "filters.zero_std=true", "optimizer.schedule=linear"])
def test_how_a_run_goes_on_may_change(tmp_path: Path, override: str) -> None:
    before = small_config(tmp_path)
    folder = RunFolder.of(before)
    folder.write(before)
    now = small_config(tmp_path, None, override)
    assert folder.check(now)
    assert digest(now) == digest(before)
    assert list(changes(before, now)) == [override.partition("=")[0]]


@pytest.mark.parametrize("override", ["run.seed=9", "sampling.group_size=2", "loss.policy=gspo", "admission.max_staleness=0"])
def test_what_defines_a_run_may_not(tmp_path: Path, override: str) -> None:
    folder = RunFolder.of(small_config(tmp_path))
    folder.write(small_config(tmp_path))
    with pytest.raises(ConsoleError, match=override.partition("=")[0]):
        folder.check(small_config(tmp_path, None, override))


def test_changes_are_recorded_with_the_step_from_which_they_hold(tmp_path: Path) -> None:
    before, now = small_config(tmp_path), small_config(tmp_path, None, "run.steps=9", "filters.zero_std=true")
    found = changes(before, now)
    assert in_words(found) == "filters.zero_std from False to True, run.steps from 4 to 9"
    assert changes(now, now) == {}
    file = RunFolder.of(now).changes
    file.parent.mkdir()
    for step in (4, 7):
        record(file, step, found)
    lines = [msgspec.json.decode(line) for line in file.read_bytes().splitlines()]
    assert [line["step"] for line in lines] == [4, 7]
    assert lines[0]["changes"] == {"filters.zero_std": [False, True], "run.steps": [4, 9]}
