"""Lists the checkpoints of a run from its folder, and requests checkpoints and restores."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable
from dataclasses import field
from pathlib import Path

from services.operations.inspection.answer import Answer
from services.protocol.errors import NotFound
from services.runtime import atomic_folders
from services.runtime.checkpoints import SNAPSHOT, CheckpointError, CheckpointFolder, Saved, surplus
from services.store import Store
from services.store.snapshot_format import Snapshot, SnapshotError


class CheckpointEntry(Answer):
    """A checkpoint, complete or not."""

    step: int
    """Last training step in it; its weights are version step + 1."""
    complete: bool
    """False: it is being written, or was left half-written, and is never loaded."""
    latest: bool
    """Whether a trainer that starts now would load it."""
    bytes: int
    """Size of its files."""
    written_s: float
    """Time of writing, Unix seconds; 0: unknown."""
    ranks: int
    """Number of trainer ranks that wrote it; any number can load it."""
    zero_stage: int
    """ZeRO stage of those ranks; any stage can load it."""
    kept_until: int | None
    """Step whose checkpoint replaces it, unless others are requested before; null: it is kept after the run ends."""
    problem: str
    """Why it cannot be loaded, or empty; damaged files are found only by `grpo checkpoints --verify`."""


class CheckpointList(Answer):
    """The checkpoints of a run, oldest step first."""

    folder: str
    """Folder of the checkpoints."""
    keep: int
    """Number of checkpoints kept (`checkpoint.keep`)."""
    checkpoints: list[CheckpointEntry]
    """Checkpoints, complete or not."""


class AskedRestore(Answer):
    """Response to a request to restore a checkpoint."""

    step: int
    """Step of the checkpoint. The trainer restarts and continues after it."""
    waiting_for: list[str] = field(default_factory=list[str])
    """Those that have not complied yet; see `wait_s`."""
    failure: str = ""
    """Why the run was not restored to it; empty: it was, or has not been yet."""


class AskedCheckpoint(Answer):
    """Response to a request for a checkpoint."""

    step: int
    """Step of the checkpoint; until it is written, the earliest possible one, because a step in training is finished first."""
    saved: bool
    """Whether it is already written."""
    failure: str = ""
    """Why the trainer could not write it; empty: it has not failed."""


def inspect_checkpoints(root: Path, steps: int, every_steps: int, keep: int, verify: bool = False) -> CheckpointList:
    """List the checkpoints under `root` of a run of `steps` that writes one after `every_steps` and keeps the last ones.

    `verify` reads every file and verifies every byte.
    """
    folder = CheckpointFolder(root)
    complete, named = folder.complete(), folder.named()
    latest = next((one for one in complete if one.folder.name == named), complete[-1] if complete else None)
    until = kept_until(folder.written(), latest.step if latest else -1, steps, every_steps, keep)
    entries = [_entry(one, one is latest, until.get(one.step), verify) for one in complete]
    entries += [_unfinished(path) for path in folder.unfinished()]
    return CheckpointList(
        folder=str(root), keep=keep, checkpoints=sorted(entries, key=lambda entry: (entry.step, entry.complete))
    )


async def request_checkpoint_of(store: Store, why: str) -> AskedCheckpoint:
    """Request a checkpoint of the committed steps; there is at most one open request.

    Raise `NotFound` when the trainer cannot write it.
    """
    state = await store.run.state()
    if state is None:
        raise NotFound("the run does not exist yet: there is nothing to save")
    step = max(state.committed_step, 0)
    if state.checkpointed_step >= step:
        return AskedCheckpoint(step=state.checkpointed_step, saved=True)
    if state.finished:
        raise NotFound(f"the run has finished ({state.finished}) without a checkpoint of step {step}: its trainer has exited")
    if not state.checkpoint or state.checkpoint_failed:  # after a failure, a new request makes the trainer try again
        await store.run.request_checkpoint(why)
    return AskedCheckpoint(step=step, saved=False)


def restorable(checkpoints: CheckpointFolder, step: int) -> Saved:
    """Return the checkpoint of `step`. Raise `CheckpointError` when a run cannot be restored to it."""
    saved = checkpoints.at(step)
    try:
        Snapshot(saved.folder / SNAPSHOT)
    except SnapshotError as error:
        raise CheckpointError(f"{error}: choose another step") from None
    return saved


async def request_restore_to(store: Store, root: Path, step: int, why: str) -> AskedRestore:
    """Request a restore to the checkpoint of `step`. Raise `NotFound` when there is no complete one, or no run."""
    try:
        await asyncio.to_thread(restorable, CheckpointFolder(root), step)
    except CheckpointError as error:
        raise NotFound(str(error)) from None
    if await store.run.state() is None:
        raise NotFound("the run does not exist yet: there is nothing to restore")
    await store.run.request_restore(step, why)
    return AskedRestore(step=step)


def kept_until(written: Iterable[int], latest: int, steps: int, every_steps: int, keep: int) -> dict[int, int]:
    """Map each checkpoint that will be deleted or rewritten to the step after which that happens.

    `written`: the steps of the checkpoints, in order of writing. `latest`: the step after which the run continues.
    """
    last, until, held = steps - 1, dict[int, int](), list(written)
    given = set(held)
    for step in (*range(((latest + 1) // every_steps + 1) * every_steps - 1, last, every_steps), last):
        if step <= latest or given <= until.keys():
            break
        gone = {*surplus(held, step, keep, latest), step}
        until |= dict.fromkeys(gone & given - until.keys(), step)
        held, latest = [*(one for one in held if one not in gone), step], step
    return until


def _entry(saved: Saved, latest: bool, until: int | None, verify: bool) -> CheckpointEntry:
    problem = saved.refusal
    if verify and not problem:
        try:
            saved.verify()
        except CheckpointError as error:
            problem = str(error)
    facts = saved.manifest.facts
    return CheckpointEntry(
        step=saved.step,
        complete=True,
        latest=latest,
        bytes=saved.size_bytes,
        written_s=saved.written_s,
        ranks=facts.get("ranks", 0),
        zero_stage=facts.get("zero_stage", 0),
        kept_until=until,
        problem=problem,
    )


def _unfinished(path: Path) -> CheckpointEntry:
    step = int(path.name.removeprefix("step-").split(".")[0])
    return CheckpointEntry(
        step=step,
        complete=False,
        latest=False,
        bytes=_size_bytes(path),
        written_s=0.0,
        ranks=0,
        zero_stage=0,
        kept_until=None,
        problem=f"it has no {atomic_folders.MANIFEST}: it is being written, or was left half-written",
    )


def _size_bytes(folder: Path) -> int:
    """Return the size of the files in a folder that may be renamed or deleted meanwhile."""
    found = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found += Path(place, name).stat().st_size
    return found
