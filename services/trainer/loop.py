"""The trainer's main loop, on rank 0: train, commit, sync, publish, checkpoint; step after step.

Guarantees: a step is trained on exactly its plan; `committed_step` is the one count of steps; weights go to the fleet after
every step, before the first and after every resume; a trainer that was killed trains the same plans again from its last
checkpoint and ends where it would have.
Waits for: the plan of the next step, the end of a pause, sync rounds. Unblocked by: dataprep (`steps`), operators
(`control`), generators (`acks`, `fleet`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import cast

import structlog

from services.protocol.messages import StepPlan
from services.protocol.store import RunState
from services.runtime.loops import Fatal, Loop
from services.runtime.portal import Portal
from services.runtime.service import Service
from services.trainer.crew import Crew
from services.trainer.metrics import TrainerMetrics
from services.trainer.sync import Alone, Stopped, SyncReport, SyncRounds
from services.trainer.weights import SendFailed
from services.trainer.worker import Worker

log = structlog.get_logger()

LOOK_S = 1.0  # a missed ring costs at most this much
RANKS_EVERY_S = 5.0  # how often waiting ranks hear that there is nothing to do


class TrainLoop:
    """Rank 0's loop. Runs in the main thread; Redis is reached through the portal."""

    def __init__(
        self, service: Service, portal: Portal, worker: Worker, crew: Crew, metrics: TrainerMetrics, fault: Callable[[], None]
    ) -> None:
        """`fault` raises when the process's background loops have failed for good."""
        self.service, self.worker, self.crew, self.metrics, self._fault = service, worker, crew, metrics, fault
        self.config, self.store, self.bell, self.call = service.config, service.store, service.bell, portal.call
        self._portal = portal
        self.loop = service.add_loop("train", _nothing, limit_s=service.config.trainer.step_timeout_s)
        self.fence = self.call(self.store.attach_trainer())
        self.step = -1  # the last step in the weights of this process
        self._saved = -1  # the last step a checkpoint of ours holds
        self._ranks_told = time.monotonic()
        self._last_record = time.monotonic()
        self._generated_before = 0.0
        self.rounds = SyncRounds(self.config, self.store, self.bell, portal, self.fence, worker.sender, self._send, self._tick)

    def run(self) -> None:
        """From the last checkpoint to the end of the run, or until asked to stop."""
        try:
            self._catch_up()
            self._sync()
            while self.step + 1 < self.config.run.steps:
                state = self._next_plan()
                if state.stopping:
                    break
                self._train_next()
            self._end()
        except Stopped:
            if not self.service.view.ended:
                self._save()
            log.info("stopped", step=self.step)
        finally:
            self.crew.dismiss()

    def _state(self) -> RunState:
        state = self.call(self.store.state())
        if state is None:
            raise Fatal(f"run {self.config.run.name!r} vanished from Redis")
        return state

    def _catch_up(self) -> None:
        """Load the last checkpoint and train again what was committed after it, on the same plans."""
        state = self._state()
        self.step = self._saved = cast(int, self.crew.lead("restore"))
        root = self.worker.checkpoints.root
        if self.step > state.committed_step:
            raise Fatal(
                f"checkpoint {self.step} in {root} is ahead of Redis, which has committed step {state.committed_step}: "
                "choose another run.name, or start afresh with --fresh"
            )
        if self.step < state.checkpointed_step:
            raise Fatal(
                f"the run has a checkpoint of step {state.checkpointed_step}, but the last whole one in {root} is of step "
                f"{self.step} (-1: none), and the plans between are gone: bring the checkpoint back"
            )
        while self.step < state.committed_step:
            self._tick()
            self._say(phase="catching up", version=self.step + 1)
            started = time.monotonic()
            plan, metrics = cast("tuple[StepPlan, dict[str, float]]", self.crew.lead("train", self.step + 1))
            self.step += 1
            self._record(plan, metrics, time.monotonic() - started)
            log.info("trained again", step=self.step, committed=state.committed_step)

    def _next_plan(self) -> RunState:
        """Wait until the next step is prepared and the trainer is not paused; meanwhile bring latecomers up to date."""
        while True:
            self._tick()
            state = self._state()
            paused = self.service.kind in state.paused
            if state.stopping or (state.prepared_step > self.step and not paused):
                return state
            self._say(phase="paused" if paused else "waiting for data")
            if not paused:
                self.rounds.catch_up(self.step + 1)
            self.call(self.bell.wait("steps", "control", "fleet", timeout=LOOK_S))

    def _train_next(self) -> None:
        started = time.monotonic()
        step = self.step + 1
        self._say(phase="training")
        plan, metrics = cast("tuple[StepPlan, dict[str, float]]", self.crew.lead("train", step))
        self.call(self.store.commit(self.fence, step))
        self.step = step
        trained = time.monotonic()
        report = self._sync()
        self._record(plan, metrics | self._sync_metrics(report) | {"time/train_s": trained - started}, time.monotonic() - started)
        if (step + 1) % self.config.checkpoint.every_steps == 0 and step + 1 < self.config.run.steps:
            self._save()

    def _record(self, plan: StepPlan, metrics: dict[str, float], step_s: float) -> None:
        """Metrics of a step, for the console. One trained again is recorded again; readers take the first."""
        record = (
            plan.stats
            | metrics
            | {
                "step": float(plan.step),
                "time_s": time.time(),
                "time/step_s": step_s,
                "throughput/trained/tokens_per_s": plan.total_tokens / (time.monotonic() - self._last_record),
                "throughput/generated/tokens_per_s": self._generated_rate(plan.stats.get("tokens/gen/total", 0.0)),
            }
        )
        self._last_record = time.monotonic()
        self.metrics.observe(record)
        self.call(self.store.record(record))

    def _generated_rate(self, total: float) -> float:
        made, self._generated_before = total - self._generated_before, total
        return max(0.0, made) / (time.monotonic() - self._last_record)

    def _sync(self) -> SyncReport | None:
        """Send the weights and publish them. None: nobody is there to take them, and the run is to end."""
        self._say(phase="syncing", version=self.step + 1)
        try:
            report = self.rounds.run(self.step + 1, lambda: bool(self._state().stopping))
        except Alone:
            return None
        self.call(self.store.publish(self.fence, report.version))
        return report

    def _send(self) -> None:
        try:
            self.crew.lead("send", self.step + 1)
        except SendFailed:
            self.crew.keep_waiting()  # the others have gathered to the end, and wait for the next word
            raise

    def _sync_metrics(self, report: SyncReport | None) -> dict[str, float]:
        if report is None:
            return {"fleet/generators": 0.0}
        return {
            "time/sync_s": report.total_s,
            "time/transfer_s": report.transfer_s,
            "fleet/generators": float(len(report.members)),
            "sync/attempts": float(report.attempts),
        }

    def _save(self) -> None:
        if self.step == self._saved:
            return
        self._say(phase="saving")
        self.crew.lead("save", self.step)
        self._saved = self.step
        self.call(self.store.checkpointed(self.fence, self.step))
        self.call(self.store.retire())

    def _end(self) -> None:
        """Checkpoint, export, and end the run."""
        self._save()
        self._say(phase="exporting")
        self.crew.lead("export")
        self.call(self.store.finish(f"trained {self.step + 1} of {self.config.run.steps} steps"))

    def _say(self, **changes: object) -> None:
        """`Service.say`, on the service's own thread: its events are not for others to set."""
        self._portal.loop.call_soon_threadsafe(partial(self.service.say, **changes))

    def _tick(self) -> None:
        """Between waits: show progress, keep the other ranks from timing out, obey SIGTERM and the end of the run."""
        self.loop.progress()
        self._fault()
        if self.service.stopping.is_set():
            raise Stopped
        if time.monotonic() - self._ranks_told > RANKS_EVERY_S:
            self.crew.keep_waiting()
            self._ranks_told = time.monotonic()


async def _nothing(_: Loop) -> None:
    """The loop runs in the main thread; only its liveness is kept beside the others."""
