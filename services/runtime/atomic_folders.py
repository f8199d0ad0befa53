"""Folders that exist whole or not at all: checkpoints and exports.

Guarantees: a folder under its final name has a manifest and every file it lists; whatever a crash leaves behind has the
suffix `.partial` and is never taken for one. This module knows nothing of what is in them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

MANIFEST = "manifest.json"
"""Written last: a folder with it is complete."""

PARTIAL = ".partial"
"""Suffix of a folder being written; before it stands the number of who writes it."""

REPLACED = ".replaced" + PARTIAL
"""Suffix of a folder that a new one took the place of, until it is deleted."""

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


class FileRecord(msgspec.Struct, frozen=True):
    """One file of a folder."""

    size_bytes: int
    sha256: str


class FolderManifest(msgspec.Struct, frozen=True):
    """What a folder holds: its files by relative path, and facts about it."""

    files: dict[str, FileRecord]
    facts: dict[str, Any]


class FolderError(RuntimeError):
    """A folder could not be written or is damaged: the message names the path, the reason and the remedy."""


def unfinished(final: Path, owner: int = 0) -> Path:
    """The folder in which `owner` writes `final`: a name of its own, so that two who write at once do not mix their files."""
    return final.with_name(f"{final.name}.{owner}{PARTIAL}")


def owner_of(partial: Path) -> int:
    """Whose unfinished folder that is; 0: nobody's."""
    number = partial.name.removesuffix(PARTIAL).rpartition(".")[2]
    return int(number) if number.isdigit() else 0


def begin(final: Path, owner: int = 0) -> Path:
    """Make and return the empty folder in which `owner` writes `final`. Raises `FolderError`."""
    partial = unfinished(final, owner)
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


def finish(partial: Path, final: Path, manifest: FolderManifest, objection: Callable[[], str] = lambda: "") -> None:
    """Write the manifest, force every file to disk, which may take minutes, and give the folder its name unless there is an
    `objection` then. Raises `FolderError`."""
    try:
        _write(partial / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        for path in [*partial.rglob("*"), partial]:
            _sync(path)
        if problem := objection():
            raise FolderError(problem)
        aside = final.with_name(final.name + REPLACED)
        shutil.rmtree(aside, ignore_errors=True)
        if final.exists():
            final.rename(aside)  # deleted under another name: under its own it is whole, or not there
        partial.rename(final)
        _sync(final.parent)
        shutil.rmtree(aside, ignore_errors=True)
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


def read_manifest(folder: Path) -> FolderManifest:
    """The manifest of a complete folder. Raises `FolderError`."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=FolderManifest)
    except OSError as error:
        raise FolderError(f"{folder} is incomplete: {MANIFEST} cannot be read ({error.strerror})") from error
    except msgspec.MsgspecError as error:
        raise FolderError(f"{folder / MANIFEST} is damaged: {error}") from error


def verify(folder: Path, manifest: FolderManifest) -> None:
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


def discard(partial: Path) -> None:
    """Delete what was left unfinished, as far as that can be done."""
    shutil.rmtree(partial, ignore_errors=True)


def check(folder: Path) -> FolderManifest:
    """The manifest of a folder that is whole and undamaged: every byte is compared. Raises `FolderError`."""
    manifest = read_manifest(folder)
    verify(folder, manifest)
    return manifest


def remove(folders: Iterable[Path]) -> None:
    """Delete folders, as far as that can be done; one whose deletion is cut off has no final name any more."""
    for folder in folders:
        aside = folder.with_name(folder.name + REPLACED)
        with contextlib.suppress(OSError):  # what cannot be deleted takes space, and is tried again the next time
            folder.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)


def explain(path: Path, error: OSError) -> str:
    """Why a write failed, in the words of the system, and what to do."""
    if error.errno in FULL:
        remedy = "free space there, raise the limit, or lower checkpoint.keep"
    elif error.errno in READ_ONLY:
        remedy = "make it writable for this user, or set run.dir to a folder that is"
    else:
        remedy = "free space or make it writable (run.dir, checkpoint.keep)"
    return f"{path} cannot be written: {error.strerror or error}; {remedy}"


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Force a file, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        return FileRecord(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
