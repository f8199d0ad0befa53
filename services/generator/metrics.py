"""Prometheus metrics of a generator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.generator.concurrency import REASONS, Limit
from services.generator.engines.base import Gauges
from services.protocol.messages import SYNC_PHASES, Header
from services.runtime.holding import FAILURES
from services.runtime.metrics import Metrics, PhaseClock, counter, gauge, histogram
from services.verifiers.pool import PoolCounts

HANDED_BACK = ("drain", "load")
SYNC_WAITS = ("gathered", "joined", "paused")
"""Waits after a phase: for the other members, and for the trainer."""


class VllmMetrics(Collector):
    """vLLM's own metrics, which it registers with the client library and not with a pod."""

    def collect(self) -> Iterable[Metric]:
        """Return the metrics that vLLM has registered in this process; none with another engine."""
        return [metric for metric in REGISTRY.collect() if metric.name.startswith("vllm:")]


class GeneratorMetrics(Metrics):
    """The metrics of a generator."""

    version: Gauge = gauge("grpo_generator_policy_version", "", "Policy version of the engine. -1: none yet.")
    behind: Gauge = gauge("grpo_generator_versions_behind", "", "Published policy version minus the engine's.")
    evaluating: Gauge = gauge("grpo_generator_evaluating", "", "1 while the pod stays on its weights for an evaluation round.")
    running: Gauge = gauge("grpo_generator_rollouts", "tickets", "Training tickets whose completions are being generated.")
    scoring: Gauge = gauge("grpo_generator_scoring", "tickets", "Training tickets whose completions wait for their scores.")
    scoring_limit: Gauge = gauge("grpo_generator_scoring_limit", "tickets", "Maximum number of tickets waiting for scores.")
    limit: Gauge = gauge("grpo_generator_rollouts_limit", "tickets", "Maximum number of tickets that the engine can run.")
    limit_reason: Mapping[str, Gauge] = gauge(
        "grpo_generator_rollouts_limit_reason",
        "",
        "Reason for the limit's last change: 1 for it, 0 for the others.",
        "reason",
        REASONS,
    )
    share: Gauge = gauge(
        "grpo_generator_rollouts_share", "tickets", "The pod's share of the slots: tickets that it claims at once."
    )
    requests: Mapping[str, Gauge] = gauge(
        "grpo_generator_requests",
        "",
        "Completions in the engine: being sampled, or waiting for their first token.",
        "state",
        ("running", "waiting"),
    )
    kv_usage: Gauge = gauge("grpo_generator_kv_usage_ratio", "ratio", "Share of the KV cache used by running completions.")
    sampled: Counter = counter("grpo_generator_sampled_tokens_total", "tokens", "Tokens sampled by the engine.")
    claimed: Counter = counter("grpo_generator_claimed_tickets_total", "tickets", "Training tickets claimed.")
    groups: Counter = counter("grpo_generator_groups_total", "groups", "Training groups finished.")
    tokens: Counter = counter("grpo_generator_tokens_total", "tokens", "Completion tokens of finished training groups.")
    refused: Counter = counter(
        "grpo_generator_refused_submits_total", "tickets", "Groups refused on submission because their lease was lost."
    )
    lost: Counter = counter("grpo_generator_lost_leases_total", "tickets", "Tickets whose lease was lost to another pod.")
    failures: Mapping[str, Counter] = counter(
        "grpo_generator_failures_total",
        "tickets",
        "Failed rollouts, by cause: a verifier, the engine, Redis, or another.",
        "reason",
        FAILURES,
    )
    given_up: Counter = counter(
        "grpo_generator_given_up_tickets_total", "tickets", "Tickets moved to the dead letters after their last attempt."
    )
    handed_back: Mapping[str, Counter] = counter(
        "grpo_generator_handed_back_total",
        "tickets",
        "Tickets handed back, because of a drain or of load on the engine.",
        "reason",
        HANDED_BACK,
    )
    handed_back_tokens: Counter = counter(
        "grpo_generator_handed_back_tokens_total", "tokens", "Completion tokens saved with tickets handed back in a drain."
    )
    generate_s: Histogram = histogram(
        "grpo_generator_generate_seconds", "seconds", "Time from the claim to the last token of a group."
    )
    score_s: Histogram = histogram(
        "grpo_generator_score_seconds", "seconds", "Duration of scoring a group, including the wait for a worker."
    )
    submit_s: Histogram = histogram("grpo_generator_submit_seconds", "seconds", "Duration of submitting a group to Redis.")
    verifier_busy: Counter = counter(
        "grpo_generator_verifier_busy_seconds_total", "seconds", "Time that verifier workers were busy."
    )
    verifier_restarts: Counter = counter("grpo_generator_verifier_restarts_total", "", "Restarts of verifier workers.")
    sync_s: Mapping[str, Histogram] = histogram(
        "grpo_generator_sync_seconds",
        "seconds",
        "Duration of the phases of weight-sync rounds: the pod's own part of each, and its waits for the others.",
        "phase",
        (*SYNC_PHASES, *SYNC_WAITS),
    )
    pause_s: Histogram = histogram(
        "grpo_generator_sync_pause_seconds", "seconds", "Time that the engine did not sample while new weights were applied."
    )
    fetched_bytes: Counter = counter(
        "grpo_generator_fetched_weights_bytes_total", "bytes", "Bytes of weights fetched from the store of versions."
    )
    catch_ups: Counter = counter(
        "grpo_generator_catch_ups_total", "", "Fetches of the published weights from the store, outside rounds."
    )
    sync_failures: Counter = counter("grpo_generator_sync_failures_total", "", "Failed phases of weight-sync rounds.")

    def sync_clock(self) -> PhaseClock:
        """Return a clock that records the phases of weight-sync rounds; `rounds` is the last one."""
        self.rounds = PhaseClock({phase: made.observe for phase, made in self.sync_s.items()})
        return self.rounds

    def show_limit(self, limit: Limit, share: int) -> None:
        """Export how many tickets the pod may hold, and why."""
        self.limit.set(limit.groups)
        for reason, shown in self.limit_reason.items():
            shown.set(reason == limit.reason)
        self.share.set(share)

    def show_engine(self, engine: Gauges, before: Gauges) -> None:
        """Export the engine's load and the tokens sampled since the last poll."""
        self.requests["running"].set(engine.running)
        self.requests["waiting"].set(engine.waiting)
        self.kv_usage.set(engine.kv_usage)
        self.sampled.inc(max(0, engine.tokens - before.tokens))

    def show_versions(self, held: int, published: int) -> None:
        """Export the policy version of the pod and how far it is behind."""
        self.version.set(held)
        self.behind.set(max(0, published - held))

    def show_verifiers(self, counts: PoolCounts, before: PoolCounts) -> None:
        """Count the work of verifier workers since the last poll."""
        self.verifier_busy.inc(counts.busy_s - before.busy_s)
        self.verifier_restarts.inc(counts.restarts - before.restarts)

    def observe(self, header: Header) -> None:
        """Count a finished group."""
        self.groups.inc()
        self.tokens.inc(sum(header.lengths))
        self.generate_s.observe(header.generate_s)
        self.score_s.observe(header.score_s)
