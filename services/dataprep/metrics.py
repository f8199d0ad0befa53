"""Prometheus metrics of dataprep: what the leader does, and where the run stands."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter, Gauge, Histogram

from services.runtime.metrics.declarations import Metrics, PhaseClock, bounded, counter, counters, gauge, gauges, histogram

FILTERED = ("filtered:zero", "filtered:solved", "filtered:nonzero", "filtered:all_truncated")
ACTIONS = ("insert", *FILTERED, "stale", "failed")
WAITS = ("groups", "older_ticket", "min_size", "rate_limiter", "ahead")
PLACES = ("queued", "claimed", "headers", "buffered", "prepared", "requeued", "reissue")
OUTCOMES = ("trained", *FILTERED, "stale", "evicted", "failed")
MARKS = ("prepared", "committed", "checkpointed", "published")
ROLES = ("generator", "dataprep", "trainer")
KINDS = (*ROLES, "tracker")
LAGS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)


class DataprepMetrics(Metrics):
    """What the leader of a run does."""

    leads: Gauge = gauge("grpo_dataprep_leads", "", "1 while this process leads.")
    issued: Counter = counter("grpo_dataprep_issued_tickets_total", "tickets", "Tickets issued by this process.")
    settled: Mapping[str, Counter] = counters(
        "grpo_dataprep_settled_groups_total", "groups", "Finished groups by what became of them.", "action", ACTIONS
    )
    stale: Counter = counter("grpo_dataprep_stale_groups_total", "groups", "Groups dropped from the table as stale.")
    prepared: Counter = counter("grpo_dataprep_prepared_steps_total", "steps", "Steps prepared by this process.")
    passed_over: Counter = counter("grpo_dataprep_passed_over_steps_total", "steps", "Steps' worth of prompts all filtered.")
    overtook: Counter = counter("grpo_dataprep_overtaking_steps_total", "steps", "Steps made while an older ticket was out.")
    short: Counter = counter("grpo_dataprep_short_steps_total", "steps", "Steps with fewer groups than prompts_per_step.")
    waited: Mapping[str, Counter] = counters(
        "grpo_dataprep_wait_seconds_total", "seconds",
        "Time in which no step was made, by why: too few groups, an older ticket is out, min_size, the rate limiter, or enough "
        "steps lie ahead of the trainer.", "why", WAITS,
    )  # fmt: skip
    settle_s: Histogram = histogram("grpo_dataprep_settle_seconds", "seconds", "Settling of a batch of headers.")
    plan_s: Histogram = histogram("grpo_dataprep_plan_seconds", "seconds", "Making of a step's plan, from its groups to Redis.")
    lag: Histogram = histogram(
        "grpo_dataprep_group_lag_steps", "steps", "Step minus oldest policy version of the groups of prepared steps.", LAGS
    )
    lag_bound: Gauge = gauge("grpo_dataprep_lag_bound_steps", "steps", "The largest lag allowed, admission.max_staleness.")

    def wait_clock(self) -> PhaseClock:
        """Notes why no step is made."""
        return PhaseClock({why: made.inc for why, made in self.waited.items()})


class EvaluationMetrics(Metrics):
    """Evaluation rounds, as their leader saw them end."""

    rounds: Mapping[str, Counter] = counters(
        "grpo_evaluation_rounds_total", "",
        "Rounds by how they ended: reported; begun and given up, for a reason that the log and `grpo status` have; never begun, "
        "as their version had passed.", "outcome", ("complete", "abandoned", "skipped"),
    )  # fmt: skip
    seconds: Histogram = histogram(
        "grpo_evaluation_seconds", "seconds", "Complete rounds, from the first volunteer to the last result."
    )
    completions: Counter = counter("grpo_evaluation_completions_total", "", "Completions of complete rounds.")
    last: Gauge = bounded(
        "gauge", "grpo_evaluation_metric", "", "Scores of the last complete round: pass@k, reward and length of every source.",
        "name", "docs/evaluation.md",
    )  # fmt: skip

    def complete(self, record: Mapping[str, float], completions: int) -> None:
        """Show a round."""
        self.rounds["complete"].inc()
        self.seconds.observe(record["eval/wall_s"])
        self.completions.inc(completions)
        for name, value in record.items():
            if name.startswith("eval/"):
                self.last.labels(name).set(value)


class RunMetrics(Metrics):
    """Where the run stands; shown by every dataprep pod, leader or standby (run_gauges.py)."""

    steps: Gauge = gauge("grpo_run_steps", "steps", "Length of the run.")
    marks: Mapping[str, Gauge] = gauges(
        "grpo_run_done_steps", "steps", "Steps of the run that are prepared, committed, checkpointed; policy version published.",
        "mark", MARKS,
    )  # fmt: skip
    slots: Gauge = gauge("grpo_run_slots", "tickets", "Slots of the run: tickets that may be under way.")
    slots_used: Gauge = gauge("grpo_run_used_slots", "tickets", "Slots in use.")
    tickets: Mapping[str, Gauge] = gauges(
        "grpo_run_tickets", "tickets",
        "Tickets by where they are: waiting for a generator, claimed by one, finished and not settled, in the replay table and "
        "never trained, in a prepared step, taken from the dead letters, cut off by a restore.", "place", PLACES,
    )  # fmt: skip
    oldest: Gauge = gauge("grpo_run_oldest_ticket_seconds", "seconds", "Age of the oldest ticket that waits or is claimed.")
    buffered: Gauge = gauge("grpo_run_replay_groups", "groups", "Groups in the replay table.")
    outcomes: Mapping[str, Gauge] = gauges(
        "grpo_run_outcome_tickets", "tickets", "Tickets by how they ended. A restore takes the counts back to its checkpoint.",
        "outcome", OUTCOMES,
    )  # fmt: skip
    doubled: Gauge = gauge("grpo_run_doubled_tickets", "tickets", "Tickets trained twice as new: must stay 0.")
    dead_letters: Gauge = gauge("grpo_run_dead_letters", "tickets", "Entries of the dead letters.")
    paused: Mapping[str, Gauge] = gauges("grpo_run_paused", "", "1 while a role is asked to pause.", "role", ROLES)
    ended: Gauge = gauge("grpo_run_ended", "", "1 once the run is to end, or has.")
    pods: Mapping[str, Gauge] = gauges("grpo_run_pods", "", "Pods heard of within fleet.ttl_s.", "kind", KINDS)
    wanted: Gauge = gauge("grpo_run_wanted_generators", "", "Generators that the run is wanted to have.")
    redis_memory: Gauge = gauge(
        "grpo_redis_used_memory_bytes", "bytes", "Memory that Redis uses; of several servers, the fullest."
    )
    redis_limit: Gauge = gauge("grpo_redis_memory_limit_bytes", "bytes", "Memory that it may use; 0: no limit.")
    redis_clients: Gauge = gauge("grpo_redis_clients", "", "Connections to Redis; of several servers, the most.")
    redis_persists: Gauge = gauge("grpo_redis_persists", "", "1 while Redis' last write to its append-only file went well.")
    redis_answer_s: Histogram = histogram("grpo_redis_answer_seconds", "seconds", "Answer of Redis to the count of all tickets.")
