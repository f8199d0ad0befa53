"""Folders appear atomically, and damage to them is detected."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.runtime import atomic_folders
from services.runtime.atomic_folders import FolderError, FolderManifest


def _make(final: Path, content: bytes = b"weights") -> FolderManifest:
    partial = atomic_folders.begin(final)
    (partial / "inner").mkdir()
    atomic_folders.write(partial / "inner" / "data", content)
    manifest = FolderManifest(atomic_folders.records(partial), {"step": 3})
    atomic_folders.finish(partial, final, manifest)
    return manifest


def test_a_folder_appears_atomically(tmp_path: Path) -> None:
    final = tmp_path / "new" / "folder"
    manifest = _make(final)
    assert atomic_folders.read_manifest(final) == manifest
    assert list(manifest.files) == ["inner/data"]
    atomic_folders.verify(final, manifest)
    assert [path.name for path in final.parent.iterdir()] == ["folder"]


def test_an_unfinished_folder_is_ignored_and_cleared(tmp_path: Path) -> None:
    partial = atomic_folders.begin(tmp_path / "folder")
    atomic_folders.write(partial / "rest", b"left by a crash")
    assert not (tmp_path / "folder").exists()
    assert not list(atomic_folders.begin(tmp_path / "folder").iterdir())


def test_a_folder_is_replaced(tmp_path: Path) -> None:
    _make(tmp_path / "folder", b"old")
    _make(tmp_path / "folder", b"new")
    assert (tmp_path / "folder" / "inner" / "data").read_bytes() == b"new"


def test_a_link_to_another_disk_is_followed_every_time(tmp_path: Path) -> None:
    """It may have been created before there was anything to link to."""
    final, there = tmp_path / "folder", tmp_path / "disk" / "exports" / "folder"
    final.symlink_to(there)
    for content in (b"old", b"new", b"newer"):
        _make(final, content)
        assert (there / "inner" / "data").read_bytes() == content
    assert final.is_symlink()
    assert [path.name for path in there.parent.iterdir()] == ["folder"]


def test_a_link_that_was_set_aside_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "folder.replaced.partial").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    _make(tmp_path / "folder", b"old")
    _make(tmp_path / "folder", b"new")
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "elsewhere"}


@pytest.mark.parametrize(
    ("damage", "message"), [(b"weightz", "SHA-256"), (b"weight", "6 bytes, not 7"), (None, "cannot be read")]
)
def test_damaged_files_are_named(tmp_path: Path, damage: bytes | None, message: str) -> None:
    manifest = _make(tmp_path / "folder")
    data = tmp_path / "folder" / "inner" / "data"
    data.unlink() if damage is None else data.write_bytes(damage)
    with pytest.raises(FolderError, match=message):
        atomic_folders.verify(tmp_path / "folder", manifest)


def test_a_damaged_or_missing_manifest_is_named(tmp_path: Path) -> None:
    _make(tmp_path / "folder")
    (tmp_path / "folder" / atomic_folders.MANIFEST).write_text("{")
    with pytest.raises(FolderError, match=r"manifest\.json is damaged"):
        atomic_folders.read_manifest(tmp_path / "folder")
    with pytest.raises(FolderError, match="incomplete"):
        atomic_folders.read_manifest(tmp_path / "absent")


def test_an_unwritable_location_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(FolderError, match="cannot be written: Not a directory; free space or make it writable"):
        atomic_folders.begin(tmp_path / "file" / "folder")


def test_a_pointer_is_replaced_atomically(tmp_path: Path) -> None:
    atomic_folders.replace(tmp_path / "latest", b"one")
    atomic_folders.replace(tmp_path / "latest", b"two")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    assert (tmp_path / "latest").read_bytes() == b"two"
