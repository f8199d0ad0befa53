"""Metrics of the trainer's process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from services.protocol.messages import StepPlan
from services.trainer.metrics import TrainerMetrics

PLAN = StepPlan(0, [], [], 1, 1, [1], [8.0], 8, 16, {})


def test_the_metrics_of_a_step_are_forgotten_with_the_next() -> None:
    registry = CollectorRegistry()
    metrics = TrainerMetrics(registry)

    def shown(name: str) -> float | None:
        return registry.get_sample_value("grpo_trainer_step_metric", {"name": name})

    metrics.observe(PLAN, {"time/step_s": 1.0, "loss/train/sum": 2.0, "damaged/train/groups": 3.0})
    assert shown("damaged/train/groups") == 3.0
    metrics.observe(PLAN, {"time/step_s": 1.0, "loss/train/sum": 4.0})
    assert (shown("damaged/train/groups"), shown("loss/train/sum")) == (None, 4.0)
