"""Shows a run as plain lines, one per step and per event, for pipes, logs and `--no-screen`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Self

from services.operations.figures import left_s, step_line
from services.operations.observe import Poll


class PlainDisplay:
    """Prints to standard output, flushing each line."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._rows: list[Mapping[str, float]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def event(self, text: str) -> None:
        """Print an event."""
        _print(f"- {text}")

    def loading(self, text: str) -> None:
        """Print how far services are loaded."""
        _print(f"- {text}")

    def steps(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Print steps."""
        for row in rows:
            self._rows.append(row)
            _print(step_line(row, self._steps, left_s(self._rows, self._steps)))

    def draw(self, poll: Poll, waiting: Mapping[str, float]) -> None:
        """Do nothing: plain lines are never redrawn."""


def _print(line: str) -> None:
    """Print a line. A closed pipe (`grpo run … | head`) must not end the run."""
    with contextlib.suppress(OSError):
        print(line, flush=True)
