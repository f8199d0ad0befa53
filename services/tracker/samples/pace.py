"""How often the sample log is written: large files cost less of a core than many small ones."""

from __future__ import annotations

import time

POLL_S = 1.0  # the shortest time between two files
LONGEST_S = 10.0
SHARE = 0.004  # of a core, to be spent on writing; reading takes about half as much
WAITING_BYTES = 8 << 20  # of tokens that may come together meanwhile: Redis keeps a bounded amount


class Pace:
    """The time until the next file, by what the last one took."""

    def __init__(self) -> None:
        self._began_s, self.wait_s = time.monotonic(), POLL_S

    def wrote(self, cpu_s: float, size_bytes: int) -> None:
        """Note a file of `size_bytes` of tokens, which came together since the one before."""
        now_s = time.monotonic()
        took_s, self._began_s = now_s - self._began_s, now_s
        longest_s = min(LONGEST_S, took_s * WAITING_BYTES / max(1, size_bytes))
        self.wait_s = max(POLL_S, min(longest_s, cpu_s / SHARE))
