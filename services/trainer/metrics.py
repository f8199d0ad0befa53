"""Prometheus metrics of a trainer: every metric of the last step, by its own name."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge


class TrainerMetrics:
    """What the trainer shows of its steps."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.steps = Counter("grpo_trainer_steps", "Steps committed by this process.", registry=registry)
        self.last = Gauge("grpo_trainer_step_metric", "Metrics of the last step (docs/metrics.md).", ["name"], registry=registry)

    def observe(self, record: Mapping[str, float]) -> None:
        """Show the record of a step."""
        self.steps.inc()
        for name, value in record.items():
            self.last.labels(name).set(value)
