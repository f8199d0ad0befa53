"""The trainer's main loop, on rank 0: train, commit, send the weights, checkpoint; step after step.

Guarantees: a step is trained on exactly its plan; `committed_step` is the only count of steps; weights go to the fleet after
every step, before the first one and after every resume, and generators apply them while the next step trains; a trainer that
was killed retrains the same plans from its last checkpoint and ends with the same weights; a run that Redis lost resumes from the
last checkpoint (resume.py); a group whose payload is damaged or missing costs the run only that group (discard_damaged.py).
Waits for: the plan of the next step, the end of a pause, sync rounds. Unblocked by: dataprep (`steps`), operators (`control`),
generators (`acks`, `fleet`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import cast

import structlog

from services.config.evaluation import FINAL_S
from services.config.loss_in_words import loss_in_words
from services.groups.replay_weights import sampling_weight
from services.protocol.errors import Damaged
from services.protocol.messages import StepPlan
from services.runtime.loops import Loop
from services.runtime.portal import Portal
from services.runtime.service import Service
from services.store import RunState
from services.trainer import ranks
from services.trainer.metrics import ACTIVITY, TrainerMetrics
from services.trainer.ranks import RankCommands
from services.trainer.recovery import Recovery
from services.trainer.saving import Saving
from services.trainer.step.discard_damaged import discard_damaged
from services.trainer.step.logprob_gaps import EngineComparison
from services.trainer.step.policy import Trained
from services.trainer.throughput import Throughput
from services.trainer.weight_updates import WeightUpdates
from services.trainer.worker import Worker
from services.weights.rounds.delivery import DELIVERED
from services.weights.rounds.leader import Stopped

log = structlog.get_logger()

POLL_S = 1.0  # a missed notification costs at most this much
LEADER_S = 5.0  # time for dataprep's leader to end an evaluation round; longer than its polling interval
RANKS_EVERY_S = 5.0  # how often waiting ranks are told that there is nothing to do


class TrainLoop:
    """Runs rank 0's loop in the main thread and reaches Redis through the portal."""

    def __init__(
        self,
        service: Service,
        portal: Portal,
        worker: Worker,
        commands: RankCommands,
        metrics: TrainerMetrics,
        fault: Callable[[], None],
    ) -> None:
        """`fault` raises when the process's background loops have failed for good."""
        self.service, self.worker, self.commands, self.metrics, self._fault = service, worker, commands, metrics, fault
        self.config, self.store, self.notifications, self.call = service.config, service.store, service.notifications, portal.call
        self._portal, self._tracing = portal, service.tracing
        self.loop = service.add_loop("train", _nothing, limit_s=ranks.TIMEOUT_S)
        self.fence = self.call(self.store.run.attach_trainer())
        self.step = -1  # the last step in the weights of this process
        self._ranks_told = time.monotonic()
        self._throughput = Throughput(time.monotonic(), self.config.trainer.ranks, worker.policy.peak_tflops)
        self._incarnation = 0
        self._waited_s = 0.0  # for a plan, since the last record
        self._unrecorded: Callable[[], None] | None = None  # records the step that was trained last
        self.recovery = Recovery(self.config, self.store, self.fence, worker, commands, self.call, self.loop.progress)
        self.saving = Saving(self.recovery, self._say)
        self.saving.before = self._record_step
        service.activity.devices = self.config.trainer.ranks
        self._doing = metrics.phase_clock()
        self.updates = WeightUpdates(service, portal, self.recovery, metrics, self._tick, self._ending, self._say)
        self._comparison = EngineComparison(self.config.generator.engine)
        metrics.step.set_function(lambda: self.step)
        metrics.checkpointed.set_function(lambda: self.saving.last)
        metrics.failed_checkpoints.set_function(lambda: self.saving.failed)

    def run(self) -> None:
        """Run from the last checkpoint to the end of the run, or until asked to stop."""
        for sentence in loss_in_words(self.config):
            log.info("loss", means=sentence)
        try:
            self._catch_up()
            self.updates.send(self.step + 1)
            self.updates.finish()
            self._throughput.start(time.monotonic())
            while self.step + 1 < self.config.run.steps:
                state = self._next_plan()
                if state.stopping:
                    break
                with structlog.contextvars.bound_contextvars(step=self.step + 1):
                    self._train_next()
            self.updates.finish()
            self._end()
        except Stopped:
            if not self.service.view.ended:
                self.saving.save(self.step)
            log.info("stopped", step=self.step)
        finally:
            self.updates.close()
            self.worker.close()
            self.commands.dismiss()

    def _catch_up(self) -> None:
        """Resume the run and retrain what was committed after the checkpoint."""
        self._say(phase="restoring")
        self.step, state = self.recovery.take_up()
        self.saving.last, self._incarnation = self.step, state.incarnation
        self._throughput.resume(state.prepared_step)
        while self.step < state.committed_step:
            self._tick()
            self._say(phase="catching up", version=self.step + 1)
            started = time.monotonic()
            plan, trained = self._train_whole(self.step + 1)
            self.step += 1
            self.recovery.trained(plan)
            self._reweigh(trained.priorities)
            self._record(plan, trained.metrics, time.monotonic() - started)
            log.info("retrained a step", step=self.step, committed=state.committed_step)

    def _next_plan(self) -> RunState:
        """Wait until the next step is prepared and the trainer is not paused; meanwhile finish the sync, then send the weights to
        generators that joined late.
        """
        while True:
            self._tick()
            state = self.recovery.stay_in_step(self.step)
            self.saving.save_if_requested(state, self.step)
            paused = self.service.kind in state.paused
            if state.stopping or (state.prepared_step > self.step and not paused):
                return state
            self.saving.save_if_redis_is_nearly_full(self.step)
            self.updates.finish_if_delivered()
            self._say(phase="paused" if paused else "waiting for data", paused=paused)
            if not paused:
                self.updates.catch_up()
            began = time.monotonic()
            self.call(self.notifications.wait("steps", "control", "fleet", DELIVERED, timeout=POLL_S))
            if not paused:
                self._waited_s += time.monotonic() - began

    def _train_next(self) -> None:
        started, self.updates.spent_s = time.monotonic(), 0.0
        step = self.step + 1
        self._say(phase="training", paused=False)
        plan, trained = self._train_whole(step)
        self._comparison.check(step, plan.stats, trained.metrics)
        self.recovery.commit(plan)
        self.step = step
        for context in plan.traces:
            self._tracing.record("train", context, started, step=step)
        self._reweigh(trained.priorities)
        metrics = trained.metrics | {"time/train_s": time.monotonic() - started}
        self._unrecorded = lambda: self._record(plan, metrics | self.updates.measured(), time.monotonic() - started)
        try:
            self.updates.send(step + 1)
        finally:  # if told to stop meanwhile, it saves the step and exits, and nobody would record it later
            self._record_step()
        self.saving.save_if_due(step)

    def _record_step(self) -> None:
        """Record the step that was trained last, unless that is done."""
        if self._unrecorded is not None:
            self._unrecorded()
            self._unrecorded = None

    def _train_whole(self, step: int) -> tuple[StepPlan, Trained]:
        """Train a step on all ranks. Groups that cannot be trained first become dead letters, and the step continues without
        them.
        """
        while isinstance(done := self.commands.lead("train", step), Damaged):
            self.recovery.stay_in_step(step - 1)
            self.metrics.discarded.inc(self.call(discard_damaged(self.store, self.fence, step, done, self.config)))
        return cast("tuple[StepPlan, Trained]", done)

    def _reweigh(self, priorities: dict[str, float]) -> None:
        """Report to the replay table what remains to be learnt from the groups of a step. Retraining the step after a crash
        gives the same weights.
        """
        if priorities:
            weights = {group: sampling_weight(priority) for group, priority in priorities.items()}
            self.call(self.store.replay.reweigh(self.fence, weights))

    def _record(self, plan: StepPlan, metrics: dict[str, float], step_s: float) -> None:
        """Record metrics of a step, for the console. A retrained step is recorded again; readers take the first record."""
        record = (
            plan.stats
            | metrics
            | {
                "step": float(plan.step),
                "run/incarnation": float(self._incarnation),
                "checkpoint/failed": float(self.saving.failed),
                "time_s": time.time(),
                "time/step_s": step_s,
                "time/wait_s": self._waited_s,
            }
            | self._throughput.record(
                plan.step, plan.total_tokens, plan.stats.get("tokens/gen/total", 0.0), began := time.monotonic()
            )
        )
        self._waited_s = 0.0
        record |= self._throughput.utilization(record)
        self.metrics.observe(plan, record)
        self.call(self.store.monitor.record(record))
        self.metrics.record_s.observe(time.monotonic() - began)

    def _ending(self) -> bool:
        """Return whether the run is ending. Called as long as no generator takes the weights: meanwhile obey as between steps."""
        state = self.recovery.stay_in_step(self.step)
        self.saving.save_if_requested(state, self.step)
        self.saving.save_if_due(self.step)
        self.saving.save_if_redis_is_nearly_full(self.step)
        paused = self.service.kind in state.paused
        self._say(phase="paused" if paused else "syncing", paused=paused)
        return bool(state.stopping)

    def _end(self) -> None:
        """Write the checkpoint and the export, and end the run."""
        self.saving.save(self.step)
        self._say(phase="exporting")
        self.commands.lead("export", self.step)
        self._await_evaluation()
        self.call(self.store.run.finish(f"trained {self.step + 1} of {self.config.run.steps} steps", self.fence))

    def _await_evaluation(self) -> None:
        """Wait until dataprep's leader ends the last evaluation round; meanwhile send the weights to generators that joined late.

        The leader reports the round, or abandons it after `FINAL_S`, or at once when the run is stopped. A missing leader is
        waited for only briefly.
        """
        given, began = self.config.evaluation, time.monotonic()
        while given.every_steps:
            stopping = self.recovery.stay_in_step(self.step).stopping
            seen = self.call(self.store.evaluation.state(self.config.fleet.ttl_s))
            over = seen.round is None and (stopping or seen.dealt_with >= self.config.run.steps)
            if over or time.monotonic() - began > LEADER_S + (0.0 if stopping else FINAL_S):
                return
            self._say(phase="waiting for evaluation")
            self._tick()
            if not stopping:
                self.updates.catch_up()
            self.call(self.notifications.wait("evaluation", "control", "fleet", timeout=POLL_S))

    def _say(self, **changes: object) -> None:
        """Call `Service.say` on the service's own thread, because other threads must not set its events."""
        if phase := changes.get("phase"):
            self._doing.enter(str(phase))
            self.service.activity.enter(ACTIVITY[str(phase)])
        self._portal.loop.call_soon_threadsafe(partial(self.service.say, **changes))

    def _tick(self) -> None:
        """Between waits: show progress, keep the other ranks from timing out, obey SIGTERM to any rank and the end of the run."""
        self.loop.progress()
        self._fault()
        if self.service.stopping.is_set() or ranks.stop_requested():
            raise Stopped
        if time.monotonic() - self._ranks_told > RANKS_EVERY_S:
            self.commands.keep_waiting()
            self._ranks_told = time.monotonic()


async def _nothing(_: Loop) -> None:
    """Do nothing: the loop runs in the main thread, and only its liveness is tracked here."""
