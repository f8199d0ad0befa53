"""What both sides record of weight-sync rounds; trainer and generator declare the metrics."""

from __future__ import annotations

from typing import Protocol

from prometheus_client import Counter, Histogram

from services.runtime.metrics import PhaseClock


class RoundMetrics(Protocol):
    """Metrics of either side."""

    sync_failures: Counter

    def sync_clock(self) -> PhaseClock:
        """Return a clock that records the phases of the rounds."""
        ...


class MemberMetrics(RoundMetrics, Protocol):
    """Metrics of a generator."""

    pause_s: Histogram
    fetched_bytes: Counter
    catch_ups: Counter
