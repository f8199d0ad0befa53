"""What a tracker is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Record = dict[str, float]
"""Metrics by name; the keys `step` and `time_s` of a training step, `eval/version` of an evaluation round."""


class Tracker(Protocol):
    """Where records go. May raise anything, and be slow: whoever calls it runs no part of the training."""

    durable: bool  # whether what was written outlives this process at once, or only when the tracker is closed

    def write(self, steps: Sequence[Record], rounds: Sequence[Record]) -> None:
        """Take in training steps and evaluation rounds, in order."""
        ...

    def close(self) -> None:
        """Bring what was written to its end: when it returns, all of it outlives this process."""
        ...
