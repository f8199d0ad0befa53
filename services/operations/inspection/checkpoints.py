"""The checkpoints of a run, from its folder alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from services.config import RunConfig
from services.operations.inspection import Answer
from services.protocol.errors import NotFound
from services.runtime import atomic_folders
from services.runtime.checkpoints import SNAPSHOT, CheckpointError, CheckpointFolder, Saved, surplus
from services.store import Store
from services.store.snapshot_format import Snapshot, SnapshotError


class CheckpointEntry(Answer):
    """A checkpoint, or what is left of one."""

    step: int
    """The last training step in it; its weights are version step + 1."""
    complete: bool
    """False: it is being written, or was left half-written; nothing takes it up."""
    latest: bool
    """Whether a trainer that starts now takes it up."""
    bytes: int
    """Size of its files."""
    written_s: float
    """When it was written, Unix seconds; 0: unknown."""
    ranks: int
    """Trainer ranks that wrote it; any number can take it up."""
    zero_stage: int
    """ZeRO stage they had; any can take it up."""
    kept_until: int | None
    """Step whose checkpoint takes its place, if none is asked for before; null: it is kept when the run has ended."""
    problem: str
    """Why it cannot be taken up, or empty; damage is found only where every byte is compared."""


class CheckpointList(Answer):
    """The checkpoints of a run, oldest step first."""

    folder: str
    """Where they lie."""
    keep: int
    """How many are kept."""
    checkpoints: list[CheckpointEntry]
    """Complete ones and others."""


class AskedRestore(Answer):
    """What becomes of a wish to go back to a checkpoint."""

    step: int
    """The step it is of. The trainer starts anew and goes on behind it."""


class AskedCheckpoint(Answer):
    """What becomes of a wish for a checkpoint."""

    step: int
    """The step it is of; while it is not written, the first it can be of: a step that is being trained is trained to its end."""
    saved: bool
    """Whether it is written already."""


def inspect_checkpoints(config: RunConfig, root: Path, verify: bool = False) -> CheckpointList:
    """The checkpoints under `root`; `verify` reads and compares every byte of them."""
    folder = CheckpointFolder(root)
    complete, named = folder.complete(), folder.named()
    latest = next((one for one in complete if one.folder.name == named), complete[-1] if complete else None)
    until = kept_until(config, folder.written(), latest.step if latest else -1)
    entries = [_entry(one, one is latest, until.get(one.step), verify) for one in complete]
    entries += [_unfinished(path) for path in folder.unfinished()]
    return CheckpointList(
        folder=str(root), keep=config.checkpoint.keep, checkpoints=sorted(entries, key=lambda entry: (entry.step, entry.complete))
    )


async def request_checkpoint_of(store: Store, why: str) -> AskedCheckpoint:
    """Have the trainer write a checkpoint of what is committed; one wish at a time.

    Raises `NotFound` when nothing can come of it.
    """
    state = await store.run.state()
    if state is None:
        raise NotFound("the run does not exist yet: nothing is there to be saved")
    step = max(state.committed_step, 0)
    if state.checkpointed_step >= step:
        return AskedCheckpoint(step=state.checkpointed_step, saved=True)
    if state.finished:
        raise NotFound(f"the run has finished ({state.finished}) without a checkpoint of step {step}: its trainer is gone")
    if not state.checkpoint or state.checkpoint_failed:  # after a failure, to ask again is to have it tried again
        await store.run.request_checkpoint(why)
    return AskedCheckpoint(step=step, saved=False)


def restorable(checkpoints: CheckpointFolder, step: int) -> Saved:
    """The checkpoint of `step`, if a run can be taken back to it. Raises `CheckpointError`."""
    saved = checkpoints.at(step)
    try:
        Snapshot(saved.folder / SNAPSHOT)
    except SnapshotError as error:
        raise CheckpointError(f"{error}: choose another step") from None
    return saved


async def request_restore_to(store: Store, root: Path, step: int) -> AskedRestore:
    """Have the run go back to the checkpoint of `step`. Raises `NotFound` where there is no whole one, or no run."""
    try:
        await asyncio.to_thread(restorable, CheckpointFolder(root), step)
    except CheckpointError as error:
        raise NotFound(str(error)) from None
    if await store.run.state() is None:
        raise NotFound("the run does not exist yet: nothing is there to be taken back")
    await store.run.request_restore(step)
    return AskedRestore(step=step)


def kept_until(config: RunConfig, written: Iterable[int], latest: int) -> dict[int, int]:
    """Which of the checkpoints of the steps `written`, in order of writing, will be deleted or written anew -> after which step.

    The run goes on behind the step `latest`.
    """
    every, last = config.checkpoint.every_steps, config.run.steps - 1
    until, held = dict[int, int](), list(written)
    given = set(held)
    for step in (*range((latest + 1) // every * every + every - 1, last, every), last):
        if step <= latest or given <= until.keys():
            break
        gone = {*surplus(held, step, config.checkpoint.keep), step}
        until |= dict.fromkeys(gone & given - until.keys(), step)
        held = [*(one for one in held if one not in gone), step]
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
        step=saved.step, complete=True, latest=latest, bytes=saved.size_bytes, written_s=saved.written_s,
        ranks=facts.get("ranks", 0), zero_stage=facts.get("zero_stage", 0), kept_until=until, problem=problem,
    )  # fmt: skip


def _unfinished(path: Path) -> CheckpointEntry:
    files = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
    step = int(path.name.removeprefix("step-").split(".")[0])
    return CheckpointEntry(
        step=step, complete=False, latest=False, bytes=sum(files), written_s=0.0, ranks=0, zero_stage=0, kept_until=None,
        problem=f"it has no {atomic_folders.MANIFEST}: it is being written, or was left half-written",
    )  # fmt: skip
