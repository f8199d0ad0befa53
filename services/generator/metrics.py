"""Prometheus metrics of a generator."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.protocol.messages import Header

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class GeneratorMetrics:
    """What a generator counts; names carry their units."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.groups = Counter("grpo_generator_groups", "Groups finished.", registry=registry)
        self.tokens = Counter("grpo_generator_tokens", "Completion tokens of finished groups.", registry=registry)
        self.refused = Counter("grpo_generator_refused_submits", "Groups whose ticket was not held any more.", registry=registry)
        self.failures = Counter("grpo_generator_failures", "Rollouts that failed.", ["reason"], registry=registry)
        self.generate_s = Histogram(
            "grpo_generator_generate_seconds", "Claim to last token of a group.", buckets=_SECONDS, registry=registry
        )
        self.score_s = Histogram("grpo_generator_score_seconds", "Verifiers of a group.", buckets=_SECONDS, registry=registry)
        self.version = Gauge("grpo_generator_policy_version", "Policy version held.", registry=registry)
        self.running = Gauge("grpo_generator_rollouts", "Tickets under way.", registry=registry)

    def observe(self, header: Header) -> None:
        """Count a finished group."""
        self.groups.inc()
        self.tokens.inc(sum(header.lengths))
        self.generate_s.observe(header.generate_s)
        self.score_s.observe(header.score_s)
