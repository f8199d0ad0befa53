"""How many processors this process may use."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""The limit of the container: microseconds of processor time, or `max`, and the period for which they are granted."""


def processors() -> int:
    """Return the number of processors: those that this process may run on, or fewer if its container's limit is lower."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # not there, or `max`
        granted, period = map(int, QUOTA.read_text().split())
        return max(1, min(allowed, math.ceil(granted / period)))
    return allowed
