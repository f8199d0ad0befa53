"""Shows a run as plain lines, one per step, per event and per new kind of warning, for pipes, logs and `--no-screen`.

Guarantees: warnings of one kind, the same event of the same pod, are at most one line in `REPEAT_S`, with the number left out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec

from services.console.printable import printable
from services.operations.figures import left_s, step_line
from services.operations.observe import Poll
from services.runtime.exits import one_line

REPEAT_S = 60.0
POLL_BYTES = 256 * 1024
SHOWN = 160  # characters of a warning; its log has the rest
LEVELS = ("warning", "error", "critical")
NOISY = ("vllm", "py.warnings", "DeepSpeed", "transformers", "torch")  # loggers whose warnings tell an operator nothing


class PlainDisplay:
    """Prints to standard output, flushing each line. The live screen (screen.py) shows the same in its place."""

    def __init__(self, steps: int, logs: Path) -> None:
        """`logs`: the folder of the pods' logs, whose warnings are shown."""
        self._steps, self._tail = steps, WarningsTail(logs)
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


class _Event(msgspec.Struct):
    event: str
    level: str = ""
    error: str = ""
    logger: str = ""


class WarningsTail:
    """Reads warnings and errors from every `*.log` in a folder, which is JSON, from its current end.

    Each poll reads only the lines appended since the last one, at most the last `POLL_BYTES` per pod. Warnings of vLLM and other
    libraries, of which a healthy run has dozens, are left to the log; their errors are not.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {path: path.stat().st_size for path in folder.glob("*.log")}

    def poll(self) -> list[str]:
        """Return the new warnings as lines `pod: event: error`."""
        return [line for path in sorted(self._folder.glob("*.log")) for line in self._poll_file(path)]

    def _poll_file(self, path: Path) -> list[str]:
        start, end = self._read.get(path, 0), path.stat().st_size
        if end <= start:
            return []
        with path.open("rb") as file:
            file.seek(max(start, end - POLL_BYTES))
            chunk = file.read(POLL_BYTES)
        whole = chunk[: chunk.rfind(b"\n") + 1]
        self._read[path] = max(start, end - POLL_BYTES) + len(whole)
        return [f"{path.stem}: {text}" for line in whole.splitlines() if (text := _warning(line))]


def _warning(line: bytes) -> str:
    if not line.startswith(b"{"):
        return ""
    try:
        event = msgspec.json.decode(line, type=_Event)
    except msgspec.DecodeError:
        return ""
    if event.level not in LEVELS or (event.level == "warning" and event.logger.startswith(NOISY)):
        return ""
    text = printable(one_line(f"{event.event}: {event.error}" if event.error else event.event))
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
