"""The activities of a process that occupies devices, for the account of a run (docs/cost.md).

Guarantees: the seconds of all activities together are the age of the process, from its start by the operating system on.
"""

from __future__ import annotations

import os
import time

ACTIVITIES = (
    *("loading", "training", "retraining", "generating", "scoring"),
    *("evaluating", "syncing", "saving", "paused", "idle"),
)
"""`retraining`: steps that were trained before, after a crash. `scoring`: nothing is generated, only scored. `syncing`: weights
are sent or received, or a generator waits for them. `idle`: a trainer waits for data, a generator for tickets.
"""
PREFIX = "seconds/"
"""Prefix of an activity among the gauges of a heartbeat."""
DEVICES = "devices"


class Activity:
    """A clock of activities. It begins with `loading`, at the start of the process."""

    def __init__(self) -> None:
        self._spent, self._now = dict.fromkeys(ACTIVITIES, 0.0), ACTIVITIES[0]
        self._since = time.monotonic() - process_age_s()
        self.devices = 0
        """Devices that the process and those that follow it hold; 0: it has no account."""

    def enter(self, activity: str) -> None:
        """Begin an activity, which ends the previous one."""
        now = time.monotonic()
        self._spent[self._now] += now - self._since
        self._now, self._since = activity, now

    def spent(self) -> dict[str, float]:
        """Return the seconds of every activity so far."""
        return self._spent | {self._now: self._spent[self._now] + time.monotonic() - self._since}

    def gauges(self) -> dict[str, float]:
        """Return the gauges for heartbeats; none for a process without devices."""
        if not self.devices:
            return {}
        return {DEVICES: float(self.devices)} | {f"{PREFIX}{name}": seconds for name, seconds in self.spent().items() if seconds}


def process_age_s() -> float:
    """Return how long ago this process was started; 0 if the kernel does not say."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")  # `starttime` of proc(5)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return max(0.0, age_s)
