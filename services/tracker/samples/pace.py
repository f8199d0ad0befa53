"""How often the sample log is written: large files cost less of a core than many small ones."""

from __future__ import annotations

import time

POLL_S = 1.0  # how often ended groups are counted, and the shortest time between two files
LONGEST_S = 10.0
SHARE = 0.004  # of a core, to be spent on writing; reading takes about half as much
WAITING_BYTES = 8 << 20  # of tokens that may accumulate meanwhile
WAITING_STEPS = 8  # Redis holds 16 behind a checkpoint (`HELD_STEPS` in functions/steps.lua)
WAITING_GROUPS = 512  # that were dropped: Redis keeps 2,048 (`SAMPLES_KEPT` in functions/prelude.lua)


class Pace:
    """Decides when the next file is due, by the time that the last one took and by what waits."""

    def __init__(self) -> None:
        self._wrote_s, self._wait_s = time.monotonic(), 0.0

    def due(self, steps: int, groups: int) -> bool:
        """Return whether to write, given the numbers of committed steps and dropped groups that wait."""
        return time.monotonic() >= self._wrote_s + self._wait_s or steps >= WAITING_STEPS or groups >= WAITING_GROUPS

    def wrote(self, cpu_s: float, size_bytes: int) -> None:
        """Note a file of `size_bytes` of tokens, which accumulated since the previous one."""
        now_s = time.monotonic()
        took_s, self._wrote_s = now_s - self._wrote_s, now_s
        longest_s = min(LONGEST_S, took_s * WAITING_BYTES / max(1, size_bytes))
        self._wait_s = max(POLL_S, min(longest_s, cpu_s / SHARE))
