"""Which checkpoints `grpo record` uses for a step of a restored run, with a real Redis and real folders."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from services.console.bundles import record
from services.runtime import atomic_folders
from services.runtime.atomic_folders import FolderManifest
from services.runtime.checkpoints import LAYOUT, CheckpointFolder
from services.store import Store
from services.store.snapshot_format import Snapshot
from tests.support import flow
from tests.support.harness import small_config


def checkpoint(root: Path, step: int, written_s: float) -> None:
    final = root / f"step-{step:08d}"
    partial = atomic_folders.begin(final)
    atomic_folders.finish(partial, final, FolderManifest({}, {"step": step, "layout": LAYOUT, "time_s": written_s}))


async def trained(store: Store, team: flow.Team, steps: range) -> None:
    """Train steps of one group each."""
    for step in steps:
        await flow.prepare(store, team, step, [f"0-{step}"])
        await store.steps.commit(team.trainer, step)


@pytest.mark.parametrize("again", [True, False])
async def test_checkpoints_that_a_restore_abandoned_describe_no_step(store: Store, tmp_path: Path, again: bool) -> None:
    """The run reached step 4, was restored to step 1, and has trained step 4 again, with or without a new checkpoint of it."""
    team = await flow.start(store)
    await flow.buffer(store, team, 6)
    await trained(store, team, range(2))
    snapshot, folder = tmp_path / "snapshot", CheckpointFolder(tmp_path / "checkpoints")
    await store.snapshots.save(team.trainer, 1, snapshot, payloads=True)
    await trained(store, team, range(2, 5))
    for step in (1, 3, 4):
        checkpoint(folder.root, step, time.time() - 60 + step)
    team = flow.Team(0, await store.run.attach_trainer())
    await store.restores.restore(team.trainer, Snapshot(snapshot), True, lambda: None)
    leader = await store.run.lead("leader-1:boot", 60.0)
    assert leader is not None
    team = flow.Team(leader, team.trainer)
    await trained(store, team, range(2, 5))
    if again:
        checkpoint(folder.root, 4, time.time() + 1)
    await store.steps.checkpointed(team.trainer, 4)
    state = await store.run.state()
    assert state is not None
    present = await record.present(store, folder)
    before = record._before(present, state, 4)
    assert before is not None
    assert before.step == 1, "that of step 3 is of the abandoned history"
    after = await record._after(store, folder, small_config(tmp_path), 4, until=0.0)
    assert (after is not None and after.step == 4) == again
