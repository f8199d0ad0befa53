"""Mirrors a run's records to files: `metrics.jsonl`, one JSON object per step, and `evaluations.jsonl`, one per round.

Guarantees: each step and each evaluation round is in its file exactly once, in the order recorded, even if the console died in
between: a torn last line is removed, and records already written are skipped. After a run is restored to a checkpoint, its new
records replace the old ones from that step on (services/operations/history.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from services.operations.history import EVALUATED, STEP, History

__all__ = ["EVALUATED", "Mirror"]


class Mirror:
    """Writes records, numbered by `key`, to `path`, and skips those already written."""

    def __init__(self, path: Path, key: str = STEP) -> None:
        self._key, self._path = key, path
        self._history = History(key, lambda record: {**record, key: int(record[key])})
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.read_bytes() if path.exists() else b""
        kept = whole[: whole.rfind(b"\n") + 1]
        self._history.begin(msgspec.json.decode(line) for line in kept.splitlines())
        self._file = path.open("ab")
        if len(kept) < len(whole):
            self._file.truncate(len(kept))

    @property
    def rows(self) -> dict[int, dict[str, float]]:
        """The records written, by number."""
        return self._history.rows

    def add(self, records: Iterable[dict[str, float]]) -> list[dict[str, float]]:
        """Append the records whose number is new, and return them."""
        added = []
        for record in records:
            new, forgot = self._history.add(record)
            row = self.rows[int(record[self._key])] if new else {}
            if forgot:
                self._rewrite()
            elif new:
                self._file.write(msgspec.json.encode(row) + b"\n")
                self._file.flush()
            added += [row] if new else []
        return added

    def outlive(self, steps: Mirror) -> None:
        """Remove the evaluation rounds of policy versions that `steps` has replaced."""
        if self._history.outlive(steps._history):
            self._rewrite()

    def _rewrite(self) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in self.rows.values()))
        fresh.replace(self._path)
        self._file.close()
        self._file = self._path.open("ab")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
