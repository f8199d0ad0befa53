"""Folders that exist whole or not at all: checkpoints and exports.

Guarantees: a folder under its final name has a manifest and every file it lists; whatever a crash leaves behind has the
suffix `.partial` and is never taken for one. This module knows nothing of what is in them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

MANIFEST = "manifest.json"
"""Written last: a folder with it is complete."""

PARTIAL = ".partial"
"""Suffix of a folder being written."""


class FileRecord(msgspec.Struct, frozen=True):
    """One file of a folder."""

    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What a folder holds: its files by relative path, and facts about it."""

    files: dict[str, FileRecord]
    facts: dict[str, Any]


class FolderError(RuntimeError):
    """A folder could not be written or is damaged: the message names the path, the reason and the remedy."""


def begin(final: Path) -> Path:
    """Make and return the empty folder in which `final` is written. Raises `FolderError`."""
    partial = final.with_name(final.name + PARTIAL)
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    except OSError as error:
        raise FolderError(explain(partial, error)) from error
    return partial


def digests(folder: Path, share: int, shares: int) -> dict[str, FileRecord]:
    """Records of every `shares`-th file under `folder`, from the `share`-th on, so that ranks divide the reading."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(folder)): _record(path) for path in paths[share::shares]}


def finish(partial: Path, final: Path, manifest: Manifest) -> None:
    """Write the manifest, force all to disk and give the folder its name. Raises `FolderError`."""
    try:
        _write(partial / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        for folder in [path for path in partial.rglob("*") if path.is_dir()] + [partial]:
            _sync(folder)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        _sync(final.parent)
    except OSError as error:
        raise FolderError(explain(final, error)) from error


def write(path: Path, data: bytes) -> None:
    """Write a file and force it to disk. Raises `FolderError`."""
    try:
        _write(path, data)
    except OSError as error:
        raise FolderError(explain(path, error)) from error


def replace(path: Path, data: bytes) -> None:
    """Exchange a file's content in one step. Raises `FolderError`."""
    fresh = path.with_name(path.name + PARTIAL)
    try:
        _write(fresh, data)
        fresh.replace(path)
        _sync(path.parent)
    except OSError as error:
        raise FolderError(explain(path, error)) from error


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete folder. Raises `FolderError`."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except OSError as error:
        raise FolderError(f"{folder} is incomplete: {MANIFEST} cannot be read ({error.strerror})") from error
    except msgspec.MsgspecError as error:
        raise FolderError(f"{folder / MANIFEST} is damaged: {error}") from error


def verify(folder: Path, manifest: Manifest) -> None:
    """Compare every file with the manifest, reading it all. Raises `FolderError` that names the first difference."""
    for name, expected in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected.size_bytes:
                raise FolderError(f"{path} has {size} bytes, not {expected.size_bytes}: the folder is damaged")
            if _record(path).sha256 != expected.sha256:
                raise FolderError(f"{path} differs from the SHA-256 in {MANIFEST}: the folder is damaged")
        except OSError as error:
            raise FolderError(f"{path} cannot be read: {error.strerror}") from error


def remove(folders: Iterable[Path]) -> None:
    """Delete folders; one whose deletion is cut off is no complete folder any more, since its manifest goes first."""
    for folder in folders:
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def explain(path: Path, error: OSError) -> str:
    """Why a write failed, in the words of the system, and what to do."""
    return f"{path} cannot be written: {error.strerror or error}; free space or make it writable (run.dir, checkpoint.keep)"


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Force a folder's entries to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        return FileRecord(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
