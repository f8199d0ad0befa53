"""Folders that exist completely or not at all: checkpoints and exports.

Guarantees: a folder under its final name has a manifest and every file it lists; whatever a crash leaves behind has the suffix
`.partial` and is never mistaken for a complete folder. This module does not know what the folders contain.
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
"""Written last: a folder that has it is complete."""

PARTIAL = ".partial"
"""Suffix of a folder being written, after the number of its writer."""

REPLACED = ".replaced" + PARTIAL
"""Suffix of a folder that a new one replaced, until it is deleted."""

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


class FileRecord(msgspec.Struct, frozen=True):
    """One file of a folder."""

    size_bytes: int
    sha256: str


class FolderManifest(msgspec.Struct, frozen=True):
    """Contents of a folder: its files by relative path, and facts about it."""

    files: dict[str, FileRecord]
    facts: dict[str, Any]


class FolderError(RuntimeError):
    """A folder could not be written or is damaged; the message names the path, the reason and the remedy."""


class UnreadableFolder(FolderError):
    """A folder exists, but cannot be read now; whether it is damaged is unknown."""


def unfinished(final: Path, owner: int = 0) -> Path:
    """Return the folder in which `owner` writes `final`. Each owner has its own, so concurrent writers do not mix their files.

    It lies next to `final`, or where that links to: on the same disk, as it is renamed.
    """
    final = _resolved(final)
    return final.with_name(f"{final.name}.{owner}{PARTIAL}")


def owner_of(partial: Path) -> int:
    """Return the owner of an unfinished folder; 0 if it has none."""
    number = partial.name.removesuffix(PARTIAL).rpartition(".")[2]
    return int(number) if number.isdigit() else 0


def begin(final: Path, owner: int = 0) -> Path:
    """Create and return the empty folder in which `owner` writes `final`. Raises `FolderError`."""
    partial = unfinished(final, owner)
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    except OSError as error:
        raise FolderError(explain(partial, error)) from error
    return partial


def files(folder: Path) -> list[str]:
    """Return the relative paths of all files under `folder`, sorted.

    Do not rely on it for files that other machines have just written: a network file system may list an older state.
    """
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def records(folder: Path, names: Iterable[str] | None = None) -> dict[str, FileRecord]:
    """Return the records of all files under `folder`, or of those of `names`, by name. Raises `OSError`."""
    return {name: _record(folder / name) for name in (files(folder) if names is None else names)}


def finish(partial: Path, final: Path, manifest: FolderManifest, objection: Callable[[], str] = lambda: "") -> None:
    """Write the manifest, force every file to disk, which may take minutes, and rename the folder to its final name.

    Raises `FolderError`, also if there is an `objection` right before renaming.
    """
    try:
        _write(partial / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        for path in [*partial.rglob("*"), partial]:
            sync(path)
        if problem := objection():
            raise FolderError(problem)
        final = _resolved(final)
        aside = final.with_name(final.name + REPLACED)
        discard(aside)
        if final.exists():
            final.rename(aside)  # deleted under another name, so that the final name is complete or absent
        partial.rename(final)
        sync(final.parent)
        discard(aside)
    except OSError as error:
        raise FolderError(explain(final, error)) from error


def write(path: Path, data: bytes) -> None:
    """Write a file and force it to disk. Raises `FolderError`."""
    try:
        _write(path, data)
    except OSError as error:
        raise FolderError(explain(path, error)) from error


def replace(path: Path, data: bytes) -> None:
    """Replace a file's content atomically. Raises `FolderError`."""
    fresh = path.with_name(path.name + PARTIAL)
    try:
        _write(fresh, data)
        fresh.replace(path)
        sync(path.parent)
    except OSError as error:
        raise FolderError(explain(path, error)) from error


def read_manifest(folder: Path) -> FolderManifest:
    """Return the manifest of a complete folder. Raises `FolderError`, or `UnreadableFolder`."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=FolderManifest)
    except FileNotFoundError as error:
        raise FolderError(f"{folder} is incomplete: {MANIFEST} cannot be read ({error.strerror})") from error
    except OSError as error:
        raise UnreadableFolder(f"{folder / MANIFEST} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise FolderError(f"{folder / MANIFEST} is damaged: {error}") from error


def verify(folder: Path, manifest: FolderManifest, names: Iterable[str] | None = None) -> None:
    """Read every file, or those of `names`, and compare it with the manifest.

    Raises `FolderError` that names the first difference, or `UnreadableFolder`.
    """
    for name in manifest.files if names is None else names:
        path, expected = folder / name, manifest.files[name]
        try:
            size = path.stat().st_size
            if size != expected.size_bytes:
                raise FolderError(f"{path} has {size} bytes, not {expected.size_bytes}: the folder is damaged")
            if _record(path).sha256 != expected.sha256:
                raise FolderError(f"{path} differs from the SHA-256 in {MANIFEST}: the folder is damaged")
        except FileNotFoundError as error:
            raise FolderError(f"{path} cannot be read: {error.strerror}") from error
        except OSError as error:
            raise UnreadableFolder(f"{path} cannot be read: {error.strerror}") from error


def discard(partial: Path) -> None:
    """Delete an unfinished folder, or a link to one, ignoring errors."""
    with contextlib.suppress(OSError):
        partial.unlink() if partial.is_symlink() else shutil.rmtree(partial, ignore_errors=True)


def remove(folders: Iterable[Path]) -> None:
    """Delete folders, ignoring errors. A folder whose deletion is interrupted no longer has its final name."""
    for folder in folders:
        aside = folder.with_name(folder.name + REPLACED)
        with contextlib.suppress(OSError):  # what cannot be deleted takes space, and is retried the next time
            folder.rename(aside)
            discard(aside)


def explain(path: Path, error: OSError) -> str:
    """Return why a write failed, in the system's words, and what to do."""
    if error.errno in FULL:
        remedy = "free space there, raise the limit, or lower checkpoint.keep"
    elif error.errno in READ_ONLY:
        remedy = "make it writable for this user, or set run.dir to a folder that is"
    else:
        remedy = "free space or make it writable (run.dir, checkpoint.keep)"
    return f"{path} cannot be written: {error.strerror or error}; {remedy}"


def _resolved(final: Path) -> Path:
    """Return the folder that a path names, through links, even if it does not exist yet."""
    return Path(os.path.realpath(final))


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Force a file, or a folder's entries, to disk. Raises `OSError`."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        return FileRecord(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
