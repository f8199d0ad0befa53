"""Prometheus metrics of a trainer, exposed by rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Set

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.groups.histograms import separated
from services.protocol.messages import SYNC_PHASES, StepPlan
from services.runtime.metrics import Metrics, PhaseClock, counter, gauge, histogram

ACTIVITY = {
    "restoring": "loading",
    "catching up": "retraining",
    "training": "training",
    "syncing": "syncing",
    "saving": "saving",
    "waiting for data": "idle",
    "paused": "paused",
    "exporting": "saving",
    "waiting for evaluation": "idle",
}
"""The trainer's phases (`PodStatus.phase`), and the activity of the run's account (services/runtime/activity.py)."""
PHASES = tuple(ACTIVITY)
PARTS = ("fetch", "old", "reference", "forward", "backward", "step")


class TrainerMetrics(Metrics):
    """Metrics of the trainer's steps."""

    steps: Counter = counter("grpo_trainer_steps_total", "steps", "Steps trained by this process, including retrained ones.")
    step: Gauge = gauge("grpo_trainer_step", "steps", "Last step that the weights include; -1 if none.")
    phase_s: Mapping[str, Counter] = counter(
        "grpo_trainer_phase_seconds_total", "seconds", "Time the trainer spent in each phase.", "phase", PHASES
    )
    step_s: Histogram = histogram("grpo_trainer_step_seconds", "seconds", "Duration of a step: training and weight sync.")
    part_s: Mapping[str, Counter] = counter(
        "grpo_trainer_part_seconds_total",
        "seconds",
        "Training time on rank 0, by part; `fetch` is the wait for rows.",
        "part",
        PARTS,
    )
    tokens: Counter = counter("grpo_trainer_tokens_total", "tokens", "Tokens trained: each completion with its prompt.")
    response_tokens: Counter = counter("grpo_trainer_response_tokens_total", "tokens", "Completion tokens in the loss.")
    record_s: Histogram = histogram(
        "grpo_trainer_record_seconds",
        "seconds",
        "Time to write a step's metrics to Redis, which is all that trackers cost a step.",
    )
    sync_s: Mapping[str, Histogram] = histogram(
        "grpo_trainer_sync_seconds",
        "seconds",
        "Duration of each phase of weight-sync rounds, up to the last answer.",
        "phase",
        SYNC_PHASES,
    )
    discarded: Counter = counter(
        "grpo_trainer_condemned_groups_total",
        "groups",
        "Groups dropped from their step because their payload was damaged or missing; they become dead letters.",
    )
    sync_failures: Counter = counter("grpo_trainer_sync_failures_total", "", "Failed attempts at a weight-sync round.")
    members: Gauge = gauge("grpo_trainer_sync_members", "", "Generators in the last weight sync.")
    checkpoint_s: Histogram = histogram(
        "grpo_trainer_checkpoint_seconds", "seconds", "Duration of checkpoints, written or failed."
    )
    checkpointed: Gauge = gauge("grpo_trainer_checkpointed_step", "steps", "Last step covered by a checkpoint; -1 if none.")
    failed_checkpoints: Gauge = gauge(
        "grpo_trainer_failed_checkpoints", "", "Checkpoints that failed since the last successful one."
    )
    last: Gauge = gauge(
        "grpo_trainer_step_metric",
        "",
        "Metrics of the last step, named as in docs/metrics.md, without histograms.",
        "name",
        bound="docs/metrics.md",
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self._shown: Set[str] = set()  # names of the last step's metrics

    def phase_clock(self) -> PhaseClock:
        """Return a clock of the trainer's phases."""
        notes = {phase: made.inc for phase, made in self.phase_s.items()}
        return PhaseClock(notes | {"saving": self._saved})

    def _saved(self, seconds: float) -> None:
        self.phase_s["saving"].inc(seconds)
        self.checkpoint_s.observe(seconds)

    def sync_clock(self) -> PhaseClock:
        """Return a clock of the phases of weight-sync rounds; a failed round records no time."""
        return PhaseClock({phase: made.observe for phase, made in self.sync_s.items()})

    def observe(self, plan: StepPlan, record: Mapping[str, float]) -> None:
        """Update the metrics with a trained step."""
        self.steps.inc()
        self.tokens.inc(plan.total_tokens)
        self.response_tokens.inc(plan.response_tokens)
        self.step_s.observe(record["time/step_s"])
        for part, made in self.part_s.items():
            made.inc(record.get(f"time/train/{part}_s", 0.0))
        if "fleet/generators" in record:
            self.members.set(record["fleet/generators"])
        shown = separated(record)[0]
        for name in self._shown - shown.keys():
            self.last.remove(name)
        for name, value in shown.items():
            self.last.labels(name).set(value)
        self._shown = shown.keys()
