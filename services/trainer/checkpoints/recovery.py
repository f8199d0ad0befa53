"""Taking a run up where it stands, and keeping in step with a Redis that lost its last moments; on rank 0.

Guarantees: after `take_up` the weights are those behind the step that Redis names as committed, or the steps between are there to
be trained again on the same batches; a run is taken back to a checkpoint as a whole or not at all.
Waits for: the other ranks, Redis.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import structlog

from services.config import RunConfig
from services.protocol.errors import StoreError
from services.protocol.messages import StepPlan
from services.runtime.atomic_folders import FolderError
from services.runtime.checkpoints import SNAPSHOT
from services.runtime.loops import Broken, Fatal
from services.store import RunState, Store
from services.store.snapshot_format import Snapshot, SnapshotError
from services.trainer.checkpoints import resume
from services.trainer.checkpoints.folder import CheckpointWriter
from services.trainer.rank_commands import RankCommands
from services.trainer.worker import Worker

log = structlog.get_logger()

SUPERSEDED = "another trainer has taken the run over"


class Recovery:
    """What a trainer does when it starts, or Redis did. `call` awaits the store's answers, `progress` says that it lives."""

    def __init__(
        self, config: RunConfig, store: Store, fence: int, worker: Worker, commands: RankCommands, call: Callable[[Any], Any],
        progress: Callable[[], None],
    ) -> None:  # fmt: skip
        self.config, self.store, self.worker, self.commands, self.call = config, store, worker, commands, call
        self._fence, self._progress = fence, progress
        self._plans: dict[int, StepPlan] = {}  # of the steps trained since the last checkpoint, and the last before
        self._published = -1  # the last version of ours that the fleet holds
        worker.copy_state = self._copy_state
        worker.checkpoints.owner = CheckpointWriter(fence, self._superseded)

    def state(self) -> RunState:
        """The run's state. Raises `Broken` when Redis knows it no more: dataprep makes it again, the next trainer restores it."""
        state = self.call(self.store.run.state())
        if state is None:
            raise Broken(f"run {self.config.run.name!r} vanished from Redis")
        return state

    def take_up(self) -> tuple[int, RunState]:
        """Load a checkpoint; take the run back to it unless Redis knows what comes behind it. Returns its step and the state."""
        state = self.state()
        try:
            step = cast(int, self.commands.lead("restore", resume.wanted(state)))
            how = self._settle(state, step)
        except (Broken, Fatal):
            if state.restore >= 0 and not self._superseded():
                self.call(self.store.run.request_restore(None))  # else every new process would fail at it
            raise
        self.call(self.store.run.resumed(how))
        log.info(how or "new run")
        state = self.state()
        if step > state.checkpointed_step:  # its writer died before it told Redis
            self.call(self.store.steps.checkpointed(self._fence, step))
            self.call(self.store.steps.retire())
        return step, state

    def _settle(self, state: RunState, step: int) -> str:
        """Attach, or restore the checkpoint of `step`, which was loaded; how and why, or empty for a new run."""
        behind = range(step + 1, state.prepared_step + 1)
        plans = [plan for plan in (self.call(self.store.steps.plan(number)) for number in behind) if plan is not None]
        try:
            way = resume.choose(state, step, plans, self.config)
        except resume.NoWay as error:
            raise Fatal(f"{error} (checkpoints: {self.worker.checkpoints.root})") from None
        if isinstance(way, resume.Restore):
            self._restore(state)
            return f"restored, checkpoint {step}: {way.why}"
        if step == state.prepared_step == -1:
            return ""
        return f"attached, {f'checkpoint {step}' if step >= 0 else 'no checkpoint'}: {way.why}"

    def trained(self, plan: StepPlan) -> None:
        """Remember a step that no checkpoint covers yet."""
        self._plans[plan.step] = plan

    def saved(self) -> None:
        """A checkpoint covers every step so far. Redis may still lose the last commit."""
        self._plans = dict(sorted(self._plans.items())[-1:])

    def published(self, version: int) -> None:
        """The fleet holds this version of ours."""
        self._published = version

    def stay_in_step(self, step: int) -> RunState:
        """See that Redis knows every step up to `step`, which was trained, and its weights; the run's state.

        Raises `Broken` when the run goes on from elsewhere, or with another trainer.
        A server that lost its last moments has not seen the last commits: they are repeated if it still has their plans.
        """
        state = self.state()
        if resume.wanted(state) >= 0:
            raise Broken(f"the run goes back to step {resume.wanted(state)}: starting over from there")
        if state.trainer_fence != self._fence:
            raise Broken(SUPERSEDED)
        lost = range(state.committed_step + 1, step + 1)
        for number in lost:
            plan = self.call(self.store.steps.plan(number))
            if plan is None or plan != self._plans.get(number):
                raise Broken(f"Redis lost step {number}, which was trained: starting over from the last checkpoint")
        for number in lost:
            self.call(self.store.steps.commit(self._fence, number))
            log.warning("Redis had lost a commit, which was repeated", step=number)
        unknown = state.published_version < self._published or state.published_by != self._fence
        if self._published == step + 1 and unknown:
            self.call(self.store.steps.publish(self._fence, self._published))
            log.warning("Redis had lost a publication, which was repeated", version=self._published)
        return self.state() if lost else state

    def _restore(self, state: RunState) -> None:
        """Take the run in Redis back to the checkpoint that was loaded."""
        saved = self.worker.restored
        assert saved is not None
        path = saved.folder / SNAPSHOT
        if not path.exists():
            raise Fatal(f"{saved.folder} has no {SNAPSHOT}: only a Redis that knows the run can go on from it")
        try:
            snapshot = Snapshot(path)
            for name, now in (("config", state.config), ("dataset", state.dataset)):
                if (then := snapshot.head.run[name]) != now:
                    raise SnapshotError(f"its {name} is {then}, this run's {now}: choose another run.name")
            keep = all(resume.trainable(plan["plan"], self.config) for plan in snapshot.head.plans.values())
            self.call(self.store.restores.restore(self._fence, snapshot, keep, self._progress))
        except SnapshotError as error:
            raise Fatal(f"the run cannot be taken back to step {saved.step}: {error}") from error

    def _superseded(self) -> str:
        """Why what lies in the folder of checkpoints is not this trainer's to touch, or empty."""
        try:
            return "" if self.state().trainer_fence == self._fence else SUPERSEDED
        except (Broken, StoreError) as error:  # nobody can tell: the older checkpoints are left as they are
            return str(error)

    def _copy_state(self, folder: Path, step: int) -> None:
        """Write dataprep's state behind `step` into a checkpoint."""
        path, started = folder / SNAPSHOT, time.monotonic()
        try:
            self.call(self.store.snapshots.save(self._fence, step, path, self.config.checkpoint.save_replay_buffer))
        except StoreError as error:
            raise FolderError(f"{path} was not written: {error}") from error
        log.info("snapshot written", bytes=path.stat().st_size, seconds=round(time.monotonic() - started, 3))
