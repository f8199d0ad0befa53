"""Prometheus metrics of a tracker pod."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter, Gauge, Histogram

from services.runtime.metrics.declarations import Metrics, counters, gauges, histograms

TRACKERS = ("tensorboard", "wandb")


class TrackerMetrics(Metrics):
    """What each tracker has received."""

    written: Mapping[str, Counter] = counters(
        "grpo_tracker_written_records_total", "", "Steps and evaluation rounds written to a tracker.", "tracker", TRACKERS
    )
    failures: Mapping[str, Counter] = counters(
        "grpo_tracker_failures_total", "", "Failed writes to a tracker. They are retried.", "tracker", TRACKERS
    )
    write_s: Mapping[str, Histogram] = histograms(
        "grpo_tracker_write_seconds", "seconds", "Duration of successful writes to a tracker.", "tracker", TRACKERS
    )
    backlog: Mapping[str, Gauge] = gauges(
        "grpo_tracker_backlog_steps", "steps", "Recorded steps not yet written to a tracker.", "tracker", TRACKERS
    )
