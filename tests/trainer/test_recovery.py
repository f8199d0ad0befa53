"""A trainer recovers when Redis loses its last writes: real Redis, no weights."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.protocol.messages import StepPlan
from services.runtime import atomic_folders
from services.runtime.checkpoints import SNAPSHOT
from services.runtime.loops import Broken, Fatal
from services.store import Store
from services.trainer.checkpoints.folder import Checkpoints
from services.trainer.recovery import Recovery
from tests.support import flow
from tests.support.harness import small_config
from tests.support.models.lone_rank import LoneRank


class Trainer:
    """A recovery whose calls are awaited on another thread's loop, as the trainer's are."""

    def __init__(self, store: Store, fence: int, folder: Path) -> None:
        loop = asyncio.get_running_loop()
        call: Any = lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(10)  # noqa: E731
        self.checkpoints: Any = SimpleNamespace()
        worker: Any = SimpleNamespace(copy_state=None, checkpoints=self.checkpoints)
        commands: Any = SimpleNamespace(lead=self._cannot)
        self.recovery = Recovery(small_config(folder), store, fence, worker, commands, call, lambda: None)

    def _cannot(self, name: str, step: int) -> None:
        raise Broken(f"cannot {name} {step}")

    async def stay_in_step(self, step: int) -> Any:
        return await asyncio.to_thread(self.recovery.stay_in_step, step)


class Restarted(Trainer):
    """A trainer that starts on real checkpoints, of a policy that is a file."""

    def __init__(self, store: Store, fence: int, folder: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__(store, fence, folder)
        self.policy: Any = LoneRank(patch)
        self.checkpoints = Checkpoints(folder / "checkpoints", keep=2)
        self.recovery.worker = SimpleNamespace(checkpoints=self.checkpoints, restored=None)  # type: ignore[assignment]
        self.recovery.commands = SimpleNamespace(lead=self._restore)  # type: ignore[assignment]

    def _restore(self, _: str, step: int) -> int:
        found = self.checkpoints.restore(self.policy, None if step < 0 else step)
        self.recovery.worker.restored = found
        return -1 if found is None else found.step

    async def take_up(self) -> tuple[int, str]:
        """Resume the run. Return the step of the checkpoint, and how."""
        step, state = await asyncio.to_thread(self.recovery.take_up)
        return step, state.resumed

    async def save(self, store: Store, step: int) -> None:
        """Write the checkpoint of a step with dataprep's state."""
        (folder := self.checkpoints.root.parent / "copied").mkdir(exist_ok=True)
        await store.snapshots.save(self.recovery.fence, step, folder / SNAPSHOT, payloads=False)
        copy = lambda partial: shutil.copy(folder / SNAPSHOT, partial)  # noqa: E731
        await asyncio.to_thread(self.checkpoints.save, self.policy, step, copy)


async def train(store: Store, team: flow.Team, *steps: int) -> None:
    """Prepare, commit and publish further steps."""
    for step in steps:
        (group,) = await flow.buffer(store, team, 1)
        await flow.prepare(store, team, step, [group])
        await store.steps.commit(team.trainer, step)
        await store.steps.publish(team.trainer, step + 1)


def damage(folder: Path) -> None:
    """Change a file of a checkpoint."""
    (folder / "trainer" / "random-0.pt").write_bytes(b"wrong")


async def trained(store: Store, folder: Path, steps: int) -> tuple[Trainer, flow.Team]:
    """Create a run after `steps` steps, all published."""
    team = await flow.start(store)
    await flow.buffer(store, team, steps + 2)
    trainer = Trainer(store, team.trainer, folder)
    for step in range(steps):
        await flow.prepare(store, team, step, [f"0-{step}"])
        await store.steps.commit(team.trainer, step)
        plan = await store.steps.plan(step)
        assert isinstance(plan, StepPlan)
        trainer.recovery.trained(plan)
    await store.steps.publish(team.trainer, steps)
    trainer.recovery.published(steps)
    return trainer, team


async def lose(store: Store, **fields: int) -> None:
    """Set the state of a server that lost its last writes."""
    await store.client.hset(store.keys.run, mapping=fields)  # type: ignore[misc]


async def test_lost_commits_and_publication_are_repeated(store: Store, tmp_path: Path) -> None:
    trainer, _ = await trained(store, tmp_path, 3)
    await lose(store, committed_step=0, published_version=1)
    await store.client.delete(store.keys.trained(0))
    await store.client.hset(store.keys.ledger, "trained", 0)  # type: ignore[misc]
    state = await trainer.stay_in_step(2)
    assert state.committed_step == 2
    assert (await store.run.state()).published_version == 3  # type: ignore[union-attr]


async def test_a_lost_publication_is_repeated(store: Store, tmp_path: Path) -> None:
    trainer, team = await trained(store, tmp_path, 2)
    await lose(store, published_version=1)
    await trainer.stay_in_step(1)
    assert (await store.run.state()).published_version == 2  # type: ignore[union-attr]
    await lose(store, published_by=1)
    await trainer.stay_in_step(1)
    assert (await store.run.state()).published_by == team.trainer  # type: ignore[union-attr]


async def test_a_lost_or_changed_plan_stops_the_trainer(store: Store, tmp_path: Path) -> None:
    trainer, team = await trained(store, tmp_path, 2)
    await lose(store, committed_step=0, prepared_step=0)
    await store.client.delete(store.keys.step(1))
    with pytest.raises(Broken, match="Redis lost step 1, which was trained"):
        await trainer.stay_in_step(1)
    await flow.prepare(store, team, 1, ["0-2"])
    with pytest.raises(Broken, match="Redis lost step 1, which was trained"):
        await trainer.stay_in_step(1)


async def test_a_step_is_committed_only_with_the_plan_that_was_trained(store: Store, tmp_path: Path) -> None:
    """A server that restarts without its last second may have lost the plan, and dataprep prepares another one."""
    trainer, team = await trained(store, tmp_path, 2)
    await flow.prepare(store, team, 2, ["0-2"])
    plan = await store.steps.plan(2)
    assert isinstance(plan, StepPlan)
    await lose(store, prepared_step=1)
    await store.client.delete(store.keys.step(2))
    with pytest.raises(Broken, match="Redis lost step 2, which was trained: restarting from the last checkpoint"):
        await asyncio.to_thread(trainer.recovery.commit, plan)
    await flow.prepare(store, team, 2, ["0-3"])
    with pytest.raises(Broken, match="Redis lost step 2"):
        await asyncio.to_thread(trainer.recovery.commit, plan)
    assert (await store.run.state()).committed_step == 1  # type: ignore[union-attr]
    other = await store.steps.plan(2)
    assert isinstance(other, StepPlan)
    await asyncio.to_thread(trainer.recovery.commit, other)
    assert (await trainer.stay_in_step(2)).committed_step == 2


async def test_another_trainer_or_a_restore_request_stops_this_one(store: Store, tmp_path: Path) -> None:
    trainer, _ = await trained(store, tmp_path, 1)
    await trainer.stay_in_step(0)
    await store.run.request_restore(0)
    with pytest.raises(Broken, match="the run is restored to step 0: restarting from there"):
        await trainer.stay_in_step(0)
    await store.client.hdel(store.keys.run, "restore")  # type: ignore[misc]
    await store.run.attach_trainer()
    with pytest.raises(Broken, match="another trainer has taken over the run"):
        await trainer.stay_in_step(0)
    await store.restores.delete_run()
    with pytest.raises(Broken, match="is gone from Redis"):
        await trainer.stay_in_step(0)


async def test_a_superseded_trainer_leaves_checkpoints_to_its_successor(store: Store, tmp_path: Path) -> None:
    trainer, team = await trained(store, tmp_path, 1)
    owner = trainer.checkpoints.owner
    assert owner.fence == team.trainer
    assert await asyncio.to_thread(owner.superseded) == ""
    successor = Trainer(store, await store.run.attach_trainer(), tmp_path)
    assert "another trainer has taken" in await asyncio.to_thread(owner.superseded)
    await store.run.request_restore(0)
    for one, left in ((trainer, 0), (successor, -1)):
        with pytest.raises(Broken, match="cannot restore 0"):
            await asyncio.to_thread(one.recovery.take_up)
        state = await store.run.state()
        assert state is not None
        assert (state.restore, "cannot restore 0" in state.restore_fault(0)) == (left, left < 0)
    await store.restores.delete_run()
    assert "is gone" in await asyncio.to_thread(owner.superseded)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("dataset", "it continues with other prompts than this run's: restore the content of data.sources and the tools"),
        ("config", "it is of a run with another configuration: choose another run.name"),
    ],
)
async def test_a_checkpoint_of_other_prompts_is_refused_with_the_remedy(
    field: str, message: str, store: Store, tmp_path: Path
) -> None:
    """A data file was changed before Redis lost the run, or a fork has an environment with other tools."""
    trainer, team = await trained(store, tmp_path, 1)
    await store.snapshots.save(team.trainer, 0, tmp_path / SNAPSHOT, payloads=False)
    await store.client.hset(store.keys.run, field, "other")  # type: ignore[misc]
    state = await store.run.state()
    assert state is not None
    trainer.recovery.worker.restored = SimpleNamespace(folder=tmp_path, step=0)  # type: ignore[assignment]
    with pytest.raises(Fatal, match=f"the run cannot be restored to step 0: {message}"):
        await asyncio.to_thread(trainer.recovery._restore, state)


async def test_a_damaged_checkpoint_is_not_kept_in_place_of_good_ones(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, team = await trained(store, tmp_path, 1)
    trainer = Restarted(store, team.trainer, tmp_path, monkeypatch)
    await trainer.save(store, 0)
    await train(store, team, 1, 2)
    await trainer.save(store, 2)
    damage(trainer.checkpoints.root / "step-00000002")
    step, how = await trainer.take_up()
    assert step == 0
    assert "retraining 2 steps; a later checkpoint was skipped: " in how
    assert trainer.checkpoints.named() == "step-00000000"
    await train(store, team, 3)
    await trainer.save(store, 3)
    assert [saved.step for saved in trainer.checkpoints.complete()] == [0, 3]


@pytest.mark.parametrize("pointer", ["step-00000002", ""])
async def test_a_checkpoint_of_an_abandoned_history_is_not_resumed(
    pointer: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was damaged, so the run was restored to the one before; then its file was repaired, and `latest` changed by hand."""
    _, team = await trained(store, tmp_path, 1)
    trainer = Restarted(store, team.trainer, tmp_path, monkeypatch)
    await trainer.take_up()
    await trainer.save(store, 0)
    await train(store, team, 1, 2)
    await trainer.save(store, 2)
    await store.steps.checkpointed(team.trainer, 2)
    await store.steps.retire()
    later = trainer.checkpoints.root / "step-00000002"
    damage(later)
    fence = await store.run.attach_trainer()
    step, how = await Restarted(store, fence, tmp_path, monkeypatch).take_up()
    assert (step, how.partition(";")[0].partition(":")[0]) == (0, "restored from checkpoint 0")

    (later / "trainer" / "random-0.pt").write_bytes(b"state")
    (trainer.checkpoints.root / "latest").write_text(pointer)
    again = Restarted(store, await store.run.attach_trainer(), tmp_path, monkeypatch)
    step, how = await again.take_up()
    assert step == 0
    assert (
        "step-00000002 belongs to a history that was abandoned when the run was restored to step 0; to return to it, use" in how
    )

    await store.run.request_restore(2)
    for _ in range(2):  # after that restore it is the run's history again
        step, _ = await Restarted(store, await store.run.attach_trainer(), tmp_path, monkeypatch).take_up()
        assert step == 2


async def test_a_checkpoint_without_an_incarnation_is_resumed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written by an earlier version."""
    _, team = await trained(store, tmp_path, 2)
    trainer = Restarted(store, team.trainer, tmp_path, monkeypatch)
    await trainer.save(store, 1)
    path = trainer.checkpoints.root / "step-00000001" / atomic_folders.MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["facts"]["incarnation"]
    path.write_text(json.dumps(manifest))
    state = await store.run.state()
    assert state is not None
    await store.client.hset(store.keys.samples_state, f"begun:{state.incarnation}", 1)  # type: ignore[misc]
    assert (await trainer.take_up())[0] == 1
