"""The metrics stream as a file: `metrics.jsonl`, one JSON object a step.

Guarantees: each step stands in the file exactly once, in the order of the stream, whatever happened to the console in
between: a torn last line is cut off, and steps that are there are passed over.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec


class Mirror:
    """Writes steps to `path` and remembers which are there."""

    def __init__(self, path: Path) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.read_bytes() if path.exists() else b""
        kept = whole[: whole.rfind(b"\n") + 1]
        for line in kept.splitlines():
            row = msgspec.json.decode(line)
            self.rows[int(row["step"])] = row
        self._file = path.open("ab", buffering=0)
        if len(kept) < len(whole):
            self._file.truncate(len(kept))

    def add(self, records: Iterable[dict[str, float]]) -> list[dict[str, float]]:
        """Append the records whose step is not there yet; returns them."""
        new = []
        for record in records:
            step = int(record["step"])
            if step not in self.rows:
                self.rows[step] = row = {**record, "step": step}
                self._file.write(msgspec.json.encode(row) + b"\n")
                new.append(row)
        return new

    def close(self) -> None:
        """Close the file."""
        self._file.close()
