"""Shows a run as plain lines, one per step, per event and per new kind of warning, for pipes, logs and `--no-screen`.

Guarantees: warnings of one kind, the same event of the same pod, are at most one line in `REPEAT_S`, with the number left out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Self

from services.console.display.warnings_tail import WarningsTail
from services.operations.figures import left_s, step_line
from services.operations.observe import Poll

REPEAT_S = 60.0


class PlainDisplay:
    """Prints to standard output, flushing each line. The live screen (screen.py) shows the same in its place."""

    def __init__(self, steps: int, tail: WarningsTail) -> None:
        self._steps, self._tail = steps, tail
        self._rows: list[Mapping[str, float]] = []
        self._shown: dict[str, float] = {}
        """Kind of warning -> when one was printed last."""
        self._left_out: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def event(self, text: str) -> None:
        """Print an event."""
        print(f"- {text}", flush=True)

    def loading(self, text: str) -> None:
        """Print how far services are loaded."""
        print(f"- {text}", flush=True)

    def steps(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Print newly recorded steps."""
        for row in rows:
            self._rows.append(row)
            print(step_line(row, self._steps, left_s(self._rows, self._steps)), flush=True)

    def draw(self, poll: Poll, waiting: Mapping[str, float]) -> None:
        """Print new warnings of the pods; a poll itself is not shown. `waiting`: seconds until each dead child is restarted."""
        now = time.monotonic()
        for line in self._tail.poll():
            kind = ": ".join(line.split(": ")[:2])
            if now - self._shown.get(kind, -REPEAT_S) < REPEAT_S:
                self._left_out[kind] = self._left_out.get(kind, 0) + 1
                continue
            self._shown[kind] = now
            more = self._left_out.pop(kind, 0)
            print(f"! {line}" + f" ({more} more like this)" * (more > 0), flush=True)
