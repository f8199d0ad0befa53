"""Resumes a run, and keeps in step with a Redis that lost its last writes; on rank 0.

Guarantees: after `take_up` the weights are those of the step that Redis names as committed, or the steps in between are available
to be retrained on the same batches; a run is restored to a checkpoint completely or not at all.
Waits for: the other ranks, Redis.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import structlog

from services.config import RunConfig
from services.protocol import codec
from services.protocol.errors import StoreError
from services.protocol.messages import StepPlan
from services.runtime.atomic_folders import FolderError
from services.runtime.checkpoints import NO_STEP, SNAPSHOT
from services.runtime.loops import Broken, Fatal
from services.store import RunState, Store
from services.store.snapshot_format import Snapshot, SnapshotError
from services.trainer.checkpoints import resume
from services.trainer.checkpoints.folder import CheckpointWriter
from services.trainer.ranks import RankCommands
from services.trainer.worker import Worker

log = structlog.get_logger()

SUPERSEDED = "another trainer has taken over the run"
OTHER_PROMPTS = (
    "it continues with other prompts than this run's: restore the content of data.sources and the tools of environments, which "
    "prompts show, or start a new run from the export"
)


class Recovery:
    """Handles the start of a trainer and restarts of Redis. `call` awaits the store's results, `progress` reports liveness."""

    def __init__(
        self,
        config: RunConfig,
        store: Store,
        fence: int,
        worker: Worker,
        commands: RankCommands,
        call: Callable[[Any], Any],
        progress: Callable[[], None],
    ) -> None:
        self.config, self.store, self.worker, self.commands, self.call = config, store, worker, commands, call
        self.fence, self._progress = fence, progress
        self._plans: dict[int, StepPlan] = {}  # steps trained since the last checkpoint, plus its own last step
        self._published = -1  # the last version published by this trainer
        worker.copy_state = self._copy_state
        worker.checkpoints.owner = CheckpointWriter(fence, self._superseded)  # completed by `take_up`
        worker.checkpoints.progress = progress

    def state(self) -> RunState:
        """Return the run's state. Raises `Broken` if it is gone from Redis: dataprep recreates it and the next trainer restores
        it.
        """
        state = self.call(self.store.run.state())
        if state is None:
            raise Broken(f"run {self.config.run.name!r} is gone from Redis")
        return state

    def take_up(self) -> tuple[int, RunState]:
        """Load a checkpoint and resume from it, restoring the run in Redis if Redis lacks the steps after it.

        Returns the checkpoint's step and the run's state.
        """
        state = self.state()
        try:
            self._own(state)
            step = cast(int, self.commands.lead("restore", resume.wanted(state)))
            how = self._settle(state, step)
            if skipped := self.worker.checkpoints.passed_over:
                how += f"; a later checkpoint was skipped: {skipped}"
                self._abandon_later()
        except (Broken, Fatal) as error:
            if state.restore >= 0 and not self._superseded():  # otherwise every new process would fail on it
                self.call(self.store.run.restore_failed(state.restore, str(error), self.fence))
            raise
        self.call(self.store.run.resumed(how))
        log.info(how or "new run")
        state = self.state()
        self._own(state)
        if step > state.checkpointed_step:  # its writer died before it reported it to Redis
            self.call(self.store.steps.checkpointed(self.fence, step))
            self.call(self.store.steps.retire())
        return step, state

    def _own(self, state: RunState) -> None:
        """Tell the folder of checkpoints which history of the run it continues."""
        began = self.call(self.store.samples.begun()).get(state.incarnation, NO_STEP)
        self.worker.checkpoints.owner = CheckpointWriter(self.fence, self._superseded, state.incarnation, began)

    def _abandon_later(self) -> None:
        """Make `latest` name the checkpoint that was loaded instead of a later one, now that the run continues from it.

        Otherwise the later one would be kept in place of good ones, and loaded once its files are back.
        """
        assert self.worker.restored is not None
        if problem := self._superseded() or self.worker.checkpoints.point_to(self.worker.restored):
            raise Broken(problem)

    def _settle(self, state: RunState, step: int) -> str:
        """Attach to Redis, or restore the checkpoint of `step`, which is loaded. Returns how and why; empty for a new run."""
        behind = range(step + 1, state.prepared_step + 1)
        plans = [plan for plan in (self.call(self.store.steps.plan(number)) for number in behind) if plan is not None]
        try:
            way = resume.choose(state, step, plans, self.config)
        except resume.NoWay as error:
            raise Fatal(f"{error} (checkpoints: {self.worker.checkpoints.root})") from None
        if isinstance(way, resume.Restore):
            self._restore(state)
            return f"restored from checkpoint {step}: {way.why}"
        if step == state.prepared_step == -1:
            return ""
        return f"resumed {f'from checkpoint {step}' if step >= 0 else 'without a checkpoint'}: {way.why}"

    def trained(self, plan: StepPlan) -> None:
        """Remember a step that no checkpoint covers yet."""
        self._plans[plan.step] = plan

    def commit(self, plan: StepPlan) -> None:
        """Commit a step that was trained on `plan`. Raises `Broken` like `stay_in_step`, and if Redis now has another plan."""
        self.stay_in_step(plan.step - 1)
        self._expect(plan.step, plan)
        self.call(self.store.steps.commit(self.fence, plan.step))
        self.trained(plan)

    def saved(self) -> None:
        """Forget the steps that a new checkpoint covers, except the last, whose commit Redis may still lose."""
        self._plans = dict(sorted(self._plans.items())[-1:])

    def published(self, version: int) -> None:
        """Note the version that was published to the fleet."""
        self._published = version

    def stay_in_step(self, step: int) -> RunState:
        """Ensure that Redis knows every trained step up to `step` and its weights. Returns the run's state.

        A server that lost its last writes may have lost the last commits; they are repeated if it still has their plans. Raises
        `Broken` when the run continues from another step or with another trainer.
        """
        state = self.state()
        if resume.wanted(state) >= 0:
            raise Broken(f"the run is restored to step {resume.wanted(state)}: restarting from there")
        if state.trainer_fence != self.fence:
            raise Broken(SUPERSEDED)
        lost = range(state.committed_step + 1, step + 1)
        for number in lost:
            self._expect(number, self._plans.get(number))
        for number in lost:
            self.call(self.store.steps.commit(self.fence, number))
            log.warning("Redis lost a commit; repeated it", step=number)
        unknown = state.published_version < self._published or state.published_by != self.fence
        if self._published == step + 1 and unknown:
            self.call(self.store.steps.publish(self.fence, self._published))
            log.warning("Redis lost a publication; repeated it", version=self._published)
        return self.state() if lost else state

    def _expect(self, step: int, trained: StepPlan | None) -> None:
        """Raise `Broken` unless Redis has the plan that a step was trained on."""
        plan = self.call(self.store.steps.plan(step))
        if plan is None or trained is None or codec.encode(plan) != codec.encode(trained):
            raise Broken(f"Redis lost step {step}, which was trained: restarting from the last checkpoint")

    def _restore(self, state: RunState) -> None:
        """Restore the run in Redis to the checkpoint that was loaded."""
        saved = self.worker.restored
        assert saved is not None
        path = saved.folder / SNAPSHOT
        if not path.exists():
            raise Fatal(f"{saved.folder} has no {SNAPSHOT}: the run can resume from it only while Redis still has the run")
        try:
            snapshot = Snapshot(path)
            if snapshot.head.run["config"] != state.config:
                raise SnapshotError("it is of a run with another configuration: choose another run.name")
            if snapshot.head.run["dataset"] != state.dataset:
                raise SnapshotError(OTHER_PROMPTS)
            keep = all(resume.trainable(plan["plan"], self.config) for plan in snapshot.head.plans.values())
            if abandoned := self.call(self.store.restores.restore(self.fence, snapshot, keep, self._progress)):
                log.warning("evaluation round abandoned", reason=abandoned)
        except SnapshotError as error:
            raise Fatal(f"the run cannot be restored to step {saved.step}: {error}") from error

    def _superseded(self) -> str:
        """Return why this trainer must not touch the folder of checkpoints, or an empty string."""
        try:
            return "" if self.state().trainer_fence == self.fence else SUPERSEDED
        except (Broken, StoreError) as error:  # unknown: keep the older checkpoints as they are
            return str(error)

    def _copy_state(self, folder: Path, step: int) -> None:
        """Write dataprep's state after `step` into a checkpoint."""
        path, started = folder / SNAPSHOT, time.monotonic()
        try:
            self.call(self.store.snapshots.save(self.fence, step, path, self.config.checkpoint.save_replay_buffer))
        except StoreError as error:
            raise FolderError(f"cannot write {path}: {error}") from error
        log.info("snapshot written", bytes=path.stat().st_size, seconds=round(time.monotonic() - started, 3))
