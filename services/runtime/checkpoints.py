"""The checkpoints of a run on disk: `<root>/step-00000012/`, the state after training step 12, and the pointer `<root>/latest`.

Guarantees: what is listed as complete has a manifest and was written completely; nothing here writes or deletes; a checkpoint is
skipped in favour of an older one only if its files are damaged or gone. One that this program cannot load, or that cannot be read
at the moment, is rejected with the reason. So is a folder whose checkpoints are all damaged: it must not look like a new run's.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from services.runtime import atomic_folders
from services.runtime.atomic_folders import FolderError, FolderManifest, UnreadableFolder

logger = logging.getLogger(__name__)

SNAPSHOT = "dataprep.msgpack"
"""File of a checkpoint that holds dataprep's state."""

LAYOUT = 2
"""Layout version of the files in a checkpoint. Version 1 was DeepSpeed's own, which only the same number of ranks at the same
ZeRO stage could load.
"""


POLL_S = 1.0

NO_STEP = sys.maxsize
"""A step after all others."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the path, the reason and the remedy."""


class DamagedCheckpoint(CheckpointError):
    """Files of a checkpoint are damaged or gone, so that an older checkpoint may be loaded instead."""


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

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Compare every byte with the manifest, or those of the files `names`.

        Raises `DamagedCheckpoint`, or `CheckpointError` if it cannot be read now.
        """
        try:
            atomic_folders.verify(self.folder, self.manifest, names)
        except FolderError as error:
            raise _explained(self.folder, error) from error


def _step_of(name: str) -> int:
    """Return the step of a folder's name, or `NO_STEP`."""
    number = name.removeprefix("step-")
    return int(number) if number.isdigit() and number != name else NO_STEP


def _exists(path: Path) -> bool:
    """Return whether a path exists; True if that cannot be found out, as reading it tells why."""
    try:
        return path.exists()
    except OSError:
        return True


def _saved(folder: Path) -> Saved:
    """Return the checkpoint in a folder. Raises `DamagedCheckpoint`, or `CheckpointError` if it cannot be read now."""
    try:
        return Saved(folder, _step_of(folder.name), atomic_folders.read_manifest(folder))
    except FolderError as error:
        if not _exists(folder):
            raise DamagedCheckpoint(f"{folder} does not exist, although `latest` names it: it was deleted or moved") from error
        raise _explained(folder, error) from error


def _explained(folder: Path, error: FolderError) -> CheckpointError:
    """Return why a checkpoint cannot be loaded, and what to do."""
    if isinstance(error, UnreadableFolder):
        return CheckpointError(
            f"{error}; make it readable, or if that is impossible, delete {folder} to resume from the previous checkpoint"
        )
    return DamagedCheckpoint(f"{error}; restore the file, or delete {folder} to resume from the previous checkpoint")


def surplus(written: Iterable[int], step: int, keep: int, before: int) -> list[int]:
    """Return which of the checkpoints of the steps `written`, in order of writing, to delete once that of `step` exists.

    `before`: the step of the checkpoint that `latest` named until then. Checkpoints of later steps belong to a history that a
    restore has abandoned, and are deleted first.
    """
    others = sorted((one for one in written if one != step), key=lambda one: one <= min(before, step))
    return others[: max(0, len(others) + 1 - keep)]


class CheckpointFolder:
    """The checkpoints in one folder, read-only."""

    def __init__(self, root: Path, wait_s: float = 0.0) -> None:
        """`wait_s`: how long `latest` waits for the checkpoint that the pointer names to appear."""
        self.root, self.wait_s = root, wait_s
        self.passed_over = ""
        """Why `latest` last fell back to an older checkpoint; empty: it did not."""

    def complete(self) -> list[Saved]:
        """Return complete checkpoints, oldest step first, without reading their files."""
        found = list[Saved]()
        for folder in self._steps(whole=True):
            try:
                found.append(_saved(folder))
            except CheckpointError as error:
                logger.warning("checkpoint ignored: %s", error)
        return sorted(found, key=lambda saved: saved.step)

    def _steps(self, whole: bool) -> list[Path]:
        """Return the folders of steps that have a manifest, or those that have none."""
        folders = [folder for folder in self.root.glob("step-*") if _step_of(folder.name) < NO_STEP]
        return [folder for folder in folders if _exists(folder / atomic_folders.MANIFEST) == whole]

    def written(self) -> dict[int, Path]:
        """Return folders of complete checkpoints by step, in order of writing."""
        return {one.step: one.folder for one in sorted(self.complete(), key=lambda one: (one.written_s, one.step))}

    def unfinished(self) -> list[Path]:
        """Return folders of checkpoints that are being written, or were left partly written or partly deleted."""
        return sorted({*self.root.glob(f"step-*{atomic_folders.PARTIAL}"), *self._steps(whole=False)})

    def named(self) -> str:
        """Return the name of the checkpoint in `latest`, or an empty string."""
        try:
            return self._named_or_raise()
        except OSError:
            return ""

    def _named_or_raise(self) -> str:
        try:
            return (self.root / "latest").read_text(encoding="utf-8").strip()
        except (FileNotFoundError, UnicodeDecodeError):
            return ""

    def named_step(self) -> int:
        """Return the step of the checkpoint in `latest`; without one, a step after all others."""
        return _step_of(self.named())

    def latest(
        self, verify: Callable[[Saved], None] = Saved.verify, abandoned: Callable[[Saved], str] = lambda _: ""
    ) -> Saved | None:
        """Return the checkpoint that `latest` names, or the last undamaged one before it; None if there is no checkpoint at all.

        `verify` compares every byte. Checkpoints of later steps, left behind by a restore, come last. Raises `CheckpointError` if
        the checkpoint is from another version of this program or cannot be read now, or if all checkpoints are damaged.
        `abandoned` returns why a checkpoint counts as damaged although it is not, because it is of another history of the run.
        """
        self.passed_over = ""
        damaged = list[str]()
        for folder in self._by_preference():
            try:
                candidate = _saved(folder)
                if candidate.refusal:
                    raise CheckpointError(candidate.refusal)
                if why := abandoned(candidate):
                    raise DamagedCheckpoint(why)
                verify(candidate)
            except DamagedCheckpoint as error:
                damaged.append(str(error))
                logger.warning("checkpoint skipped: %s", error)
            else:
                self.passed_over = next(iter(damaged), "")
                return candidate
        if damaged:
            raise CheckpointError(
                f"no checkpoint in {self.root} can be loaded: {'; '.join(damaged)}; to start from model.path again, choose "
                "another run.name"
            )
        return None

    def _by_preference(self) -> list[Path]:
        """Return the folders of all steps, complete or not, in the order in which they are tried. Raises `CheckpointError`.

        Includes the one that `latest` names, even if the listing lacks it: a network file system may cache an old one.
        """
        try:
            name = self._named_or_raise()
        except OSError as error:
            raise CheckpointError(f"{self.root / 'latest'} cannot be read: {error.strerror}; make it readable") from error
        named, first = _step_of(name), list[Path]()
        if named < NO_STEP:
            first = [self.root / name]
            until = time.monotonic() + self.wait_s
            while not _exists(first[0] / atomic_folders.MANIFEST) and time.monotonic() < until:
                time.sleep(POLL_S)
        steps = {folder: _step_of(folder.name) for folder in [*first, *self._listed()]}
        return sorted(steps, key=lambda folder: (steps[folder] <= named, steps[folder]), reverse=True)

    def _listed(self) -> list[Path]:
        """Return the folders of all steps, complete or not. Raises `CheckpointError`."""
        try:
            return [self.root / name for name in os.listdir(self.root) if _step_of(name) < NO_STEP]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.root} cannot be read: {error.strerror}; make it readable") from error

    def at(self, step: int, verify: Callable[[Saved], None] = Saved.verify) -> Saved:
        """Return the checkpoint of a step. `verify` compares every byte. Raises `CheckpointError` if it cannot be loaded."""
        name = f"step-{step:08d}"
        folder = next((one for one in self._listed() if _step_of(one.name) == step), self.root / name)
        if _exists(folder / atomic_folders.MANIFEST):
            saved = _saved(folder)
            if saved.refusal:
                raise CheckpointError(saved.refusal)
            verify(saved)
            return saved
        half = any(path.name.split(".")[0] == name for path in self.unfinished())
        why = f"was never finished: it has no {atomic_folders.MANIFEST}" if half else "does not exist"
        there = ", ".join(str(saved.step) for saved in self.complete()) or "none"
        raise CheckpointError(f"the checkpoint of step {step} in {self.root} {why}; complete checkpoints: {there}")
