"""Prometheus metrics of a tracker pod."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter, Gauge, Histogram

from services.runtime.metrics.declarations import Metrics, counters, gauges, histograms

TRACKERS = ("tensorboard", "wandb")


class TrackerMetrics(Metrics):
    """What has reached each tracker."""

    written: Mapping[str, Counter] = counters(
        "grpo_tracker_written_records_total", "", "Steps and evaluation rounds that a tracker took.", "tracker", TRACKERS
    )
    failures: Mapping[str, Counter] = counters(
        "grpo_tracker_failures_total", "", "Writes that a tracker failed at; they are tried again.", "tracker", TRACKERS
    )
    write_s: Mapping[str, Histogram] = histograms(
        "grpo_tracker_write_seconds", "seconds", "Writes of records to a tracker that came to an end.", "tracker", TRACKERS
    )
    backlog: Mapping[str, Gauge] = gauges(
        "grpo_tracker_backlog_steps", "steps", "Recorded steps that a tracker has not taken; it may hang.", "tracker", TRACKERS
    )
