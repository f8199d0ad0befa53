"""Whether a round whose members all hold the base gets a delta: a pure state machine.

Guarantees: with `sync.encoding = "auto"` both kinds are tried, then the one that took less is used, and the other is tried again
after `TRY_AGAIN` rounds. Only rounds that could have been either count, since a new group's first transfer takes longer.
"""

from __future__ import annotations

import math
from typing import Literal

TRY_AGAIN = 32
"""Rounds between two trials of the slower encoding: if it takes ten times as long, the trials cost 28 % of the time."""


class EncodingChoice:
    """Makes the choice for one sender."""

    def __init__(self, encoding: Literal["full", "delta", "auto", "sparse"]) -> None:
        self._encoding = encoding
        self._took: dict[bool, float] = {}  # seconds of the last round with a delta, and of the last without
        self._since = 0  # rounds since the slower was tried

    def delta(self) -> bool:
        """Return whether to send a delta in a round that could use one."""
        if self._encoding != "auto":
            return self._encoding == "delta"
        if len(self._took) < 2:
            return True not in self._took
        faster = self._took[True] <= self._took[False]
        return faster != (self._since >= TRY_AGAIN)

    def too_slow(self) -> None:
        """Count a delta that exceeded the time limit of a round as the slower encoding."""
        self._took[True], self._since = math.inf, 0

    def took(self, delta: bool, seconds: float) -> None:
        """Record the seconds of a round that could have used either encoding."""
        self._took[delta] = seconds
        tried = len(self._took) == 2 and delta != (self._took[True] <= self._took[False])
        self._since = 0 if tried else self._since + 1
