"""The checkpoints of a run on disk: `<root>/step-00000012/`, the state after training step 12, and the pointer `<root>/latest`.

Guarantees: what is listed as complete has a manifest and was written completely; nothing here writes or deletes; a checkpoint
that this program cannot load is rejected with the reason, never skipped in favour of an older one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from services.runtime import atomic_folders
from services.runtime.atomic_folders import FolderError, FolderManifest

logger = logging.getLogger(__name__)

SNAPSHOT = "dataprep.msgpack"
"""File of a checkpoint that holds dataprep's state."""

LAYOUT = 2
"""Layout version of the files in a checkpoint. Version 1 was DeepSpeed's own, which only the same number of ranks at the same
ZeRO stage could load.
"""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the path, the reason and the remedy."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    folder: Path
    step: int  # the last training step in its weights, which are version step + 1
    manifest: FolderManifest

    @property
    def size_bytes(self) -> int:
        """Return the size of all its files in bytes."""
        return sum(record.size_bytes for record in self.manifest.files.values())

    @property
    def written_s(self) -> float:
        """Return when it was written, in Unix seconds."""
        return float(self.manifest.facts.get("time_s", 0.0))

    @property
    def refusal(self) -> str:
        """Return why this program cannot load it, or an empty string."""
        layout = self.manifest.facts.get("layout", 1)
        if layout == LAYOUT:
            return ""
        age = "a newer" if layout > LAYOUT else "an older"
        return (
            f"{self.folder} was written by {age} version of this program (checkpoint layout {layout}, this one reads {LAYOUT}): "
            "use that version, or start a new run from its export"
        )

    def read(self, name: str) -> bytes:
        """Return a file stored next to the state. Raises `CheckpointError`."""
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read {self.folder / name}: {error.strerror}") from error

    def verify(self) -> None:
        """Compare every byte with the manifest. Raises `CheckpointError`."""
        try:
            atomic_folders.verify(self.folder, self.manifest)
        except FolderError as error:
            raise CheckpointError(
                f"{error}; restore the file, or delete {self.folder} to resume from the previous checkpoint"
            ) from error


def surplus(written: Iterable[int], step: int, keep: int, before: int) -> list[int]:
    """Return which of the checkpoints of the steps `written`, in order of writing, to delete once that of `step` exists.

    `before`: the step of the checkpoint that `latest` named until then. Checkpoints of later steps belong to a history that a
    restore has abandoned, and are deleted first.
    """
    others = sorted((one for one in written if one != step), key=lambda one: one <= min(before, step))
    return others[: max(0, len(others) + 1 - keep)]


class CheckpointFolder:
    """The checkpoints in one folder, read-only."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.passed_over = ""
        """Why `latest` last fell back to an older checkpoint; empty: it did not."""

    def complete(self) -> list[Saved]:
        """Return complete checkpoints, oldest step first, without reading their files."""
        found = []
        for folder in self.root.glob("step-*"):
            number = folder.name.removeprefix("step-")
            if number.isdigit() and (folder / atomic_folders.MANIFEST).exists():
                try:
                    found.append(Saved(folder, int(number), atomic_folders.read_manifest(folder)))
                except FolderError as error:
                    logger.warning("checkpoint ignored: %s", error)
        return sorted(found, key=lambda saved: saved.step)

    def written(self) -> dict[int, Path]:
        """Return folders of complete checkpoints by step, in order of writing."""
        return {one.step: one.folder for one in sorted(self.complete(), key=lambda one: (one.written_s, one.step))}

    def unfinished(self) -> list[Path]:
        """Return folders of checkpoints that are being written, or were left partly written or partly deleted."""
        marked = self.root.glob(f"step-*{atomic_folders.PARTIAL}")
        bare = (
            path for path in self.root.glob("step-*") if path.name[5:].isdigit() and not (path / atomic_folders.MANIFEST).exists()
        )
        return sorted({*marked, *bare})

    def named(self) -> str:
        """Return the name of the checkpoint in `latest`, or an empty string."""
        try:
            return (self.root / "latest").read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return ""

    def named_step(self) -> int:
        """Return the step of the checkpoint in `latest`; without one, a step after all others."""
        number = self.named().removeprefix("step-")
        return int(number) if number.isdigit() else sys.maxsize

    def latest(self) -> Saved | None:
        """Return the checkpoint that `latest` names, or the last undamaged one before it. Compares every byte.

        Checkpoints of later steps, left behind by a restore, come last. Raises `CheckpointError` if the checkpoint is from
        another version of this program.
        """
        named = self.named_step()
        self.passed_over = ""
        for candidate in sorted(self.complete(), key=lambda one: (one.step <= named, one.step), reverse=True):
            if candidate.refusal:
                raise CheckpointError(candidate.refusal)
            try:
                candidate.verify()
                return candidate
            except CheckpointError as error:
                self.passed_over = self.passed_over or str(error)
                logger.warning("checkpoint skipped: %s", error)
        return None

    def at(self, step: int) -> Saved:
        """Return the checkpoint of a step, comparing every byte. Raises `CheckpointError` if it cannot be loaded."""
        complete = self.complete()
        for saved in complete:
            if saved.step == step:
                if saved.refusal:
                    raise CheckpointError(saved.refusal)
                saved.verify()
                return saved
        name = f"step-{step:08d}"
        half = any(path.name.split(".")[0] == name for path in self.unfinished())
        why = f"was never finished: it has no {atomic_folders.MANIFEST}" if half else "does not exist"
        there = ", ".join(str(saved.step) for saved in complete) or "none"
        raise CheckpointError(f"the checkpoint of step {step} in {self.root} {why}; complete checkpoints: {there}")
