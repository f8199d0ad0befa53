"""Which checkpoint of a folder is loaded: real files, some of them damaged, gone or unreadable."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.runtime import atomic_folders
from services.runtime.checkpoints import CheckpointError, CheckpointFolder, DamagedCheckpoint
from tests.support.checkpoints import write_checkpoint


@pytest.fixture
def found(tmp_path: Path) -> CheckpointFolder:
    """Return a folder with the checkpoints of steps 9 and 14."""
    for step in (9, 14):
        write_checkpoint(tmp_path, step)
    return CheckpointFolder(tmp_path)


def looped(path: Path) -> Callable[[], object]:
    """Make a file unreadable, even for root, and return how to undo that."""
    aside = path.rename(path.with_name("aside"))
    path.symlink_to(path)
    return lambda: aside.replace(path)


def a_folder(path: Path) -> Callable[[], object]:
    """Make a manifest unreadable, even for root, and return how to undo that."""
    aside = path.rename(path.with_name("aside"))
    path.mkdir()

    def undo() -> None:
        path.rmdir()
        aside.rename(path)

    return undo


@pytest.mark.parametrize(
    ("name", "hide", "reason"),
    [
        ("state", looped, "cannot be read: Too many levels of symbolic links; make it readable"),
        (atomic_folders.MANIFEST, a_folder, "cannot be read: Is a directory; make it readable"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_now_is_not_replaced_by_an_older_one(
    name: str, hide: Callable[[Path], Callable[[], object]], reason: str, found: CheckpointFolder
) -> None:
    """The file server may be back soon: the process ends, and the next one tries again."""
    show = hide(found.root / "step-00000014" / name)
    for load in (found.latest, lambda: found.at(14)):
        with pytest.raises(CheckpointError, match=reason) as raised:
            load()
        assert not isinstance(raised.value, DamagedCheckpoint)
    show()
    assert (found.latest() or found.at(9)).step == found.at(14).step == 14


def test_an_unreadable_pointer_is_not_ignored(found: CheckpointFolder) -> None:
    """It may name an older checkpoint than the newest, after a restore."""
    show = looped(found.root / "latest")
    with pytest.raises(CheckpointError, match="latest cannot be read: Too many levels of symbolic links"):
        found.latest()
    show()
    assert found.latest() is not None


def test_a_run_whose_checkpoints_are_all_damaged_is_not_a_new_run(found: CheckpointFolder) -> None:
    (found.root / "step-00000014" / "state").write_bytes(b"other")
    assert (found.latest() or found.at(14)).step == 9
    assert "state has 5 bytes, not 10" in found.passed_over
    (found.root / "step-00000009" / atomic_folders.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be loaded: .*14/state has 5 bytes.*00009 is incomplete"):
        found.latest()
    assert found.passed_over == ""


def test_a_folder_without_checkpoints_is_that_of_a_new_run(tmp_path: Path) -> None:
    """The first checkpoint may have been interrupted."""
    assert CheckpointFolder(tmp_path / "absent").latest() is None
    atomic_folders.begin(tmp_path / "step-00000009", 7)
    assert CheckpointFolder(tmp_path).latest() is None


def test_a_checkpoint_that_was_deleted_is_reported(found: CheckpointFolder) -> None:
    shutil.rmtree(found.root / "step-00000014")
    assert (found.latest() or found.at(14)).step == 9
    assert "step-00000014 does not exist, although `latest` names it" in found.passed_over
    shutil.rmtree(found.root / "step-00000009")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be loaded: .*step-00000014 does not exist"):
        found.latest()


def test_an_outdated_listing_does_not_hide_the_latest(found: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS may list a folder from its cache after the trainer has moved to another machine."""
    monkeypatch.setattr(os, "listdir", lambda _: ["latest", "step-00000009"])
    assert (found.latest() or found.at(9)).step == found.at(14).step == 14
    assert found.passed_over == ""


def test_the_latest_may_take_a_moment_to_appear(found: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = (found.root / "step-00000014").rename(found.root / "hidden")
    monkeypatch.setattr(time, "sleep", lambda _: hidden.rename(found.root / "step-00000014"))
    assert (CheckpointFolder(found.root).latest() or found.at(14)).step == 9, "commands do not wait"
    found.wait_s = 60.0
    assert (found.latest() or found.at(9)).step == 14
    assert found.passed_over == ""
