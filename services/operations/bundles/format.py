"""The file of a bundle: a checksum, the facts as msgpack, then files such as weights one after the other.

Guarantees: reading runs no code and decodes nothing but msgpack into the types below; a file that is damaged or truncated raises
`BundleError`; a bundle is complete under its name or does not exist; a name inside it never leaves the folder that it is unpacked
to.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from services.runtime.atomic_folders import FileRecord

MAGIC = b"grpo bundle 1\n"
DIGEST_BYTES = hashlib.sha256().digest_size
LENGTH_BYTES = 8
COPY_BYTES = 1 << 20
MODEL, STATE = "model", "state"
"""Folders of a bundle: the model that the run began with, and the weights and optimizer before its steps."""
_INSIDE = re.compile(r"(model|state)/[A-Za-z0-9_][\w.-]*\.(json|safetensors|txt|model|jinja)")
"""Names of files in a bundle: plain data of kinds that hold no code, in one of its folders."""


class BundleError(ValueError):
    """A bundle cannot be written or read; the message names the path, the reason and the remedy."""


class Origin(msgspec.Struct, frozen=True):
    """The weights before the first step of a bundle."""

    step: int = -1
    """Step of their checkpoint; -1: they are those of model.path."""
    folder: str = ""
    """The checkpoint's folder on the machine that recorded."""
    files: dict[str, FileRecord] = {}
    """Files of the trainer's state in that folder."""


class RecordedStep(msgspec.Struct, frozen=True):
    """A step of the run."""

    plan: bytes
    """`StepPlan`."""
    ranks: list[bytes]
    """`RankPlan` of each rank."""
    record: dict[str, float | None] | None
    """Its metrics; None: it was not trained yet."""


class RecordedGroup(msgspec.Struct, frozen=True):
    """A group that the steps train on."""

    header: bytes
    payload: bytes
    answer: str | None
    """Gold answer; None: the row of the data set was not found, or has changed."""
    row: str
    """What verifiers are given of the row."""


class Bundle(msgspec.Struct, frozen=True):
    """A step with what led to it."""

    run: str
    step: int
    recorded_s: float
    """Unix seconds."""
    dataset: str
    config: str
    """The configuration, as TOML."""
    versions: dict[str, str]
    """Package or program -> version."""
    origin: Origin
    steps: list[RecordedStep]
    """From the one after the origin to `step`."""
    groups: dict[str, RecordedGroup]
    """Payload -> group."""
    weights: dict[str, str]
    """Parameter -> SHA-256 of its float32 weights after `step`; empty: not known."""
    model: dict[str, FileRecord]
    """Files of the model's folder."""
    files: dict[str, FileRecord] = {}
    """Files in the bundle by name, in order."""
    earlier: dict[str, list[Any]] = {}
    """Key of `[filters]` -> the values that it had before it was changed for a resumed run."""


@dataclass(frozen=True)
class BundleFile:
    """A bundle on disk that was read."""

    path: Path
    bundle: Bundle
    start: int
    """Where its files begin."""

    def has(self, folder: str) -> bool:
        """Return whether the bundle has files of a folder."""
        return any(name.startswith(f"{folder}/") for name in self.bundle.files)

    def unpack(self, folder: str, into: Path) -> Path:
        """Write the files of `folder` to `into`/`folder`, and return it. Raises `BundleError`."""
        at, target = self.start, into / folder
        target.mkdir(parents=True, exist_ok=True)
        with self.path.open("rb") as body:
            for name, record in self.bundle.files.items():
                if name.startswith(f"{folder}/"):
                    body.seek(at)
                    with (target / name.partition("/")[2]).open("wb") as file:
                        if _copy(body, file, record.size_bytes) != record.sha256:
                            raise BundleError(
                                f"{self.path} is damaged: its file {name} differs from its SHA-256; record it again"
                            )
                at += record.size_bytes
        return target


def write(path: Path, bundle: Bundle, files: Mapping[str, Path]) -> int:
    """Write a bundle with the files of these names. Return its size in bytes. Raises `BundleError`."""
    for name in files:
        if not _INSIDE.fullmatch(name):
            raise BundleError(f"{name!r} cannot be a file of a bundle: its kind or name is not one of {_INSIDE.pattern}")
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        records = {name: _record(file) for name, file in files.items()}
        body = msgspec.msgpack.encode(msgspec.structs.replace(bundle, files=records))
        with fresh.open("wb") as out:
            out.write(MAGIC + hashlib.sha256(body).digest() + len(body).to_bytes(LENGTH_BYTES, "little") + body)
            for name, file in files.items():
                with file.open("rb") as source:
                    if _copy(source, out, records[name].size_bytes) != records[name].sha256:
                        raise BundleError(f"{file} changed while it was recorded: record again")
            out.flush()
            os.fsync(out.fileno())
        fresh.replace(path)
    except OSError as error:
        raise BundleError(
            f"{path} cannot be written: {error.strerror}; free space there, or choose another place with --out"
        ) from None
    finally:
        with contextlib.suppress(OSError):  # of its absence, or the one that is reported already
            fresh.unlink()
    return path.stat().st_size


def read(path: Path) -> BundleFile:
    """Read the facts of a bundle. Raises `BundleError`."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(len(MAGIC) + DIGEST_BYTES + LENGTH_BYTES)
            if not head.startswith(MAGIC) or len(head) < len(MAGIC) + DIGEST_BYTES + LENGTH_BYTES:
                raise BundleError(f"{path} is not a bundle of this version: create one with grpo record")
            length = int.from_bytes(head[-LENGTH_BYTES:], "little")
            if length > size - len(head):
                raise BundleError(f"{path} is damaged: it is truncated; record it again")
            body = file.read(length)
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from None
    if hashlib.sha256(body).digest() != head[len(MAGIC) : len(MAGIC) + DIGEST_BYTES]:
        raise BundleError(f"{path} is damaged: its checksum differs; record it again")
    try:
        bundle = msgspec.msgpack.decode(body, type=Bundle)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BundleError(f"{path} is not a valid bundle: {error}") from None
    if wrong := [name for name in bundle.files if not _INSIDE.fullmatch(name)]:
        raise BundleError(f"{path} contains a file {wrong[0]!r}, which no bundle may have: do not use it")
    whole = len(head) + length + sum(record.size_bytes for record in bundle.files.values())
    if whole != size or any(record.size_bytes < 0 for record in bundle.files.values()):
        raise BundleError(f"{path} is damaged: it has {size} bytes, not {whole}; record it again")
    return BundleFile(path, bundle, len(head) + length)


def _record(file: Path) -> FileRecord:
    with file.open("rb") as body:
        return FileRecord(file.stat().st_size, hashlib.file_digest(body, "sha256").hexdigest())


def _copy(source: BinaryIO, target: BinaryIO, size: int) -> str:
    """Copy `size` bytes and return their SHA-256."""
    digest = hashlib.sha256()
    while size and (piece := source.read(min(size, COPY_BYTES))):
        digest.update(piece)
        target.write(piece)
        size -= len(piece)
    return digest.hexdigest()
