"""The interface of trackers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Record = dict[str, float]
"""Metrics by name, with the keys `step` and `time_s` for a training step, and `eval/version` for an evaluation round."""


class Tracker(Protocol):
    """A destination of records. It may raise anything and may be slow, since its caller takes no part in training."""

    durable: bool  # whether written records survive this process at once, or only after `close`

    def write(self, steps: Sequence[Record], rounds: Sequence[Record]) -> None:
        """Write training steps and evaluation rounds, in order."""
        ...

    def close(self) -> None:
        """Finish writing. When it returns, all records survive this process."""
        ...
