"""Prometheus metrics of dataprep: the leader's work and the state of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.runtime.metrics import Metrics, PhaseClock, counter, gauge, histogram

FILTERED = ("filtered:zero", "filtered:solved", "filtered:nonzero", "filtered:all_truncated")
ACTIONS = ("insert", *FILTERED, "stale", "failed")
WAITS = ("groups", "older_ticket", "ahead")
PLACES = ("queued", "claimed", "headers", "buffered", "prepared", "requeued", "reissue")
OUTCOMES = ("trained", *FILTERED, "stale", "evicted", "failed")
MARKS = ("prepared", "committed", "checkpointed", "published")
ROLES = ("generator", "dataprep", "trainer")
KINDS = (*ROLES, "environment", "tracker")
LAGS = buckets = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)


class DataprepMetrics(Metrics):
    """The work of a run's leader."""

    leads: Gauge = gauge("grpo_dataprep_leads", "", "1 while this process is the leader.")
    issued: Counter = counter("grpo_dataprep_issued_tickets_total", "tickets", "Tickets issued by this process.")
    settled: Mapping[str, Counter] = counter(
        "grpo_dataprep_settled_groups_total", "groups", "Settled groups, by outcome.", "action", ACTIONS
    )
    stale: Counter = counter("grpo_dataprep_stale_groups_total", "groups", "Groups dropped from the replay table as stale.")
    prepared: Counter = counter("grpo_dataprep_prepared_steps_total", "steps", "Steps prepared by this process.")
    passed_over: Counter = counter(
        "grpo_dataprep_passed_over_steps_total", "steps", "Steps skipped because every group of their prompts was filtered."
    )
    overtook: Counter = counter(
        "grpo_dataprep_overtaking_steps_total", "steps", "Steps made without waiting for an older, unfinished ticket."
    )
    short: Counter = counter("grpo_dataprep_short_steps_total", "steps", "Steps with fewer groups than prompts_per_step.")
    waited: Mapping[str, Counter] = counter(
        "grpo_dataprep_wait_seconds_total",
        "seconds",
        "Time without a step in preparation, by reason: too few groups, an older ticket unfinished, "
        "or enough steps ahead of the trainer.",
        "why",
        WAITS,
    )
    settle_s: Histogram = histogram("grpo_dataprep_settle_seconds", "seconds", "Duration of settling a batch of headers.")
    plan_s: Histogram = histogram(
        "grpo_dataprep_plan_seconds", "seconds", "Duration of planning a step, from reading its groups to storing the plan."
    )
    lag: Histogram = histogram(
        "grpo_dataprep_group_lag_steps",
        "steps",
        "Step number minus the group's oldest policy version, in prepared steps.",
        buckets=LAGS,
    )
    lag_bound: Gauge = gauge("grpo_dataprep_lag_bound_steps", "steps", "Maximum lag allowed: admission.max_staleness.")

    def wait_clock(self) -> PhaseClock:
        """Return a clock that records why no step is made."""
        return PhaseClock({why: made.inc for why, made in self.waited.items()})


class EvaluationMetrics(Metrics):
    """Evaluation rounds, counted by the leader when they end."""

    rounds: Mapping[str, Counter] = counter(
        "grpo_evaluation_rounds_total",
        "",
        "Rounds by outcome: complete and reported; abandoned, with the reason in the log and in `grpo status`; or skipped, "
        "because newer weights were already published.",
        "outcome",
        ("complete", "abandoned", "skipped"),
    )
    seconds: Histogram = histogram(
        "grpo_evaluation_seconds", "seconds", "Duration of complete rounds, from the first volunteer to the last result."
    )
    completions: Counter = counter("grpo_evaluation_completions_total", "", "Completions of complete rounds.")
    last: Gauge = gauge(
        "grpo_evaluation_metric",
        "",
        "Scores of the last complete round: pass@k, reward and length, per source.",
        "name",
        bound="docs/evaluation.md",
    )

    def complete(self, record: Mapping[str, float], completions: int) -> None:
        """Record a complete round."""
        self.rounds["complete"].inc()
        self.seconds.observe(record["eval/wall_s"])
        self.completions.inc(completions)
        for name, value in record.items():
            if name.startswith("eval/"):
                self.last.labels(name).set(value)


class RunMetrics(Metrics):
    """The state of the run, exported by every dataprep pod, leader or standby (run_gauges.py)."""

    steps: Gauge = gauge("grpo_run_steps", "steps", "Length of the run.")
    marks: Mapping[str, Gauge] = gauge(
        "grpo_run_done_steps",
        "steps",
        "Steps prepared, committed and checkpointed, and the published policy version.",
        "mark",
        MARKS,
    )
    slots: Gauge = gauge("grpo_run_slots", "tickets", "Slots of the run: the maximum number of tickets in progress.")
    slots_used: Gauge = gauge("grpo_run_used_slots", "tickets", "Slots in use.")
    tickets: Mapping[str, Gauge] = gauge(
        "grpo_run_tickets",
        "tickets",
        "Tickets by place: queued, claimed, finished but not settled, in the replay table but not yet trained on, in a prepared "
        "step, requeued from the dead letters, or to be issued again after a restore.",
        "place",
        PLACES,
    )
    oldest: Gauge = gauge("grpo_run_oldest_ticket_seconds", "seconds", "Age of the oldest ticket that is queued or claimed.")
    buffered: Gauge = gauge("grpo_run_replay_groups", "groups", "Groups in the replay table.")
    outcomes: Mapping[str, Gauge] = gauge(
        "grpo_run_outcome_tickets",
        "tickets",
        "Tickets by outcome. A restore resets the counts to those of its checkpoint. NaN before the first count.",
        "outcome",
        OUTCOMES,
    )
    doubled: Gauge = gauge(
        "grpo_run_doubled_tickets", "tickets", "Tickets trained on twice in one epoch, other than by replay. Must stay 0."
    )
    dead_letters: Gauge = gauge("grpo_run_dead_letters", "tickets", "Entries in the dead letters. NaN before the first count.")
    paused: Mapping[str, Gauge] = gauge("grpo_run_paused", "", "1 while a role is paused by request.", "role", ROLES)
    ended: Gauge = gauge("grpo_run_ended", "", "1 once the run is ending or has ended.")
    pods: Mapping[str, Gauge] = gauge("grpo_run_pods", "", "Pods with a heartbeat within fleet.ttl_s.", "kind", KINDS)
    wanted: Gauge = gauge(
        "grpo_run_wanted_generators", "", "Number of generators requested for the run. NaN: an autoscaler or `kubectl` sets it."
    )
    redis_memory: Gauge = gauge(
        "grpo_redis_used_memory_bytes", "bytes", "Memory used by Redis; with several servers, by the fullest one."
    )
    redis_limit: Gauge = gauge("grpo_redis_memory_limit_bytes", "bytes", "Memory limit of that server. 0: no limit.")
    redis_clients: Gauge = gauge(
        "grpo_redis_clients", "", "Connections to Redis; with several servers, the highest number of any."
    )
    redis_persists: Gauge = gauge("grpo_redis_persists", "", "1 if Redis' last write to its append-only file succeeded.")
    redis_answer_s: Histogram = histogram(
        "grpo_redis_answer_seconds", "seconds", "Response time of Redis to a count of all tickets."
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        for total in (*self.outcomes.values(), self.dead_letters):
            total.set(math.nan)  # until it is counted: a rise from 0 would mean that tickets have ended since
