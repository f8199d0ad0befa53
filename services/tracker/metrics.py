"""Prometheus metrics of a tracker pod."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter, Gauge, Histogram

from services.runtime.metrics import Metrics, counter, gauge, histogram

TRACKERS = ("tensorboard", "wandb")


class TrackerMetrics(Metrics):
    """What each tracker has received."""

    written: Mapping[str, Counter] = counter(
        "grpo_tracker_written_records_total", "", "Steps and evaluation rounds written to a tracker.", "tracker", TRACKERS
    )
    failures: Mapping[str, Counter] = counter(
        "grpo_tracker_failures_total", "", "Failed writes to a tracker. They are retried.", "tracker", TRACKERS
    )
    write_s: Mapping[str, Histogram] = histogram(
        "grpo_tracker_write_seconds", "seconds", "Duration of successful writes to a tracker.", "tracker", TRACKERS
    )
    backlog: Mapping[str, Gauge] = gauge(
        "grpo_tracker_backlog_steps", "steps", "Recorded steps not yet written to a tracker.", "tracker", TRACKERS
    )
    samples: Counter = counter("grpo_tracker_samples_total", "", "Completions written to the sample log.")
    sample_write_s: Histogram = histogram(
        "grpo_tracker_sample_write_seconds", "seconds", "Duration of writing a batch of groups to the sample log."
    )
    missed_groups: Gauge = gauge(
        "grpo_tracker_missed_groups",
        "groups",
        "Groups missing from the sample log because it lagged behind or no tracker was running.",
    )
