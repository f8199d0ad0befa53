"""Prometheus metrics of the sandbox service."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter, Gauge, Histogram

from services.runtime.metrics import Metrics, counter, counters, gauge, histogram


class SandboxMetrics(Metrics):
    """The metrics of the sandbox service."""

    held: Gauge = gauge("grpo_sandbox_held_pods", "", "Sandboxes in use by rollouts.")
    warm: Gauge = gauge("grpo_sandbox_warm_pods", "", "Warm sandboxes, ready for a rollout.")
    opened: Mapping[str, Counter] = counters(
        "grpo_sandbox_opened_total",
        "",
        "Sandboxes given to rollouts: warm, or cold (created on demand).",
        "kind",
        ("warm", "cold"),
    )
    swept: Counter = counter("grpo_sandbox_swept_total", "", "Sandboxes deleted because their ticket was no longer held.")
    calls: Mapping[str, Counter] = counters(
        "grpo_sandbox_calls_total", "", "Calls that ran code: done, ended because the code killed its sandbox, or lost.",
        "result", ("done", "ended", "lost"),
    )  # fmt: skip
    call_s: Histogram = histogram("grpo_sandbox_call_seconds", "seconds", "Duration of calls that ran code.")
