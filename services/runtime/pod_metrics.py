"""Prometheus metrics of every service: readiness, progress of its loops, outcomes of its spans.

Guarantees: all are set on scraping, so they cost a loop nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.runtime.activity import ACTIVITIES, Activity
from services.runtime.loops import Loop
from services.runtime.metrics import Metrics, counter, gauge
from services.runtime.tracing import OUTCOMES


class PodMetrics(Metrics):
    """Metrics of a pod of any kind."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self._shown: dict[str, float] = {}  # totals counted elsewhere, as last read

    ready: Gauge = gauge("grpo_pod_ready", "", "1 while the pod is ready for work (/health/ready).")
    silent: Gauge = gauge(
        "grpo_pod_loop_silent_seconds", "seconds", "Time since a loop last made progress.", "loop", bound="loops of the service"
    )
    limits: Gauge = gauge(
        "grpo_pod_loop_limit_seconds",
        "seconds",
        "Silence after which the pod counts as dead; +Inf: no limit.",
        "loop",
        bound="loops of the service",
    )
    failures: Counter = counter(
        "grpo_pod_loop_failures_total", "", "Failures after which a loop was restarted.", "loop", bound="loops of the service"
    )
    spans: Mapping[str, Counter] = counter(
        "grpo_pod_spans_total",
        "spans",
        "Trace spans: sent, refused by the collector, or dropped because the queue was full.",
        "outcome",
        OUTCOMES,
    )

    activity_s: Mapping[str, Counter] = counter(
        "grpo_pod_activity_seconds_total",
        "seconds",
        "Time since the process started, by activity, of pods that hold devices; `idle` is the wait for data or tickets.",
        "activity",
        ACTIVITIES,
    )

    def show(self, ready: bool, loops: Iterable[Loop], spans: Mapping[str, int], activity: Activity) -> None:
        """Set all metrics to their current values; `spans` by outcome."""
        for name, seconds in activity.spent().items() if activity.devices else ():
            self._catch_up(self.activity_s[name], name, seconds)
        self.ready.set(ready)
        for loop in loops:
            self.silent.labels(loop.name).set(loop.silent_s)
            self.limits.labels(loop.name).set(loop.limit_s)
            self._catch_up(self.failures.labels(loop.name), loop.name, loop.failures)
        for outcome, count in spans.items():
            self._catch_up(self.spans[outcome], outcome, count)

    def _catch_up(self, counter: Counter, name: str, total: float) -> None:
        """Bring a counter to a total that is counted elsewhere."""
        counter.inc(total - self._shown.get(name, 0))
        self._shown[name] = total
