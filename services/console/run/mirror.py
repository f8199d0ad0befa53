"""Mirrors a run's records to files: `metrics.jsonl`, one JSON object per step, and `evaluations.jsonl`, one per round.

Guarantees: each step and each evaluation round is in its file exactly once, in the order recorded, even if the console died in
between: a torn last line is removed, and records already written are skipped. After a run is restored to a checkpoint, its new
records replace the old ones from that step on (services/operations/history.py). What a full disk rejects is kept, and written
once there is space (`fault`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from services.console.paths import RunPaths
from services.operations.history import EVALUATED, STEP, History
from services.operations.observe import Poll

Record = dict[str, float]


class Mirror:
    """Writes records, numbered by `key`, to `path`, and skips those already written."""

    def __init__(self, path: Path, key: str = STEP) -> None:
        self._key, self._path = key, path
        self._history = History(key, lambda record: {**record, key: int(record[key])})
        self._pending: list[bytes] = []  # lines that are not in the file yet
        self._outdated = False  # whether the file has lines that were replaced
        self.fault = ""
        """Why the file lacks records; "" if it has all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.read_bytes() if path.exists() else b""
        self._length = whole.rfind(b"\n") + 1  # bytes of the lines in the file
        self._history.begin(msgspec.json.decode(line) for line in whole[: self._length].splitlines())
        with path.open("ab") as file:
            file.truncate(self._length)

    @property
    def rows(self) -> dict[int, Record]:
        """The records so far, by number."""
        return self._history.rows

    def in_order(self) -> list[Record]:
        """Return the records so far by ascending number."""
        return [self.rows[number] for number in sorted(self.rows)]

    def add(self, records: Iterable[Record]) -> list[Record]:
        """Append the records whose number is new, and return them."""
        added = []
        for record in records:
            new, forgot = self._history.add(record)
            self._outdated |= forgot
            if new:
                added.append(self.rows[int(record[self._key])])
                self._pending.append(_line(added[-1]))
        self._save()
        return added

    def outlive(self, steps: Mirror) -> None:
        """Remove the evaluation rounds of policy versions that `steps` has replaced."""
        self._outdated |= self._history.outlive(steps._history)
        self._save()

    def _save(self) -> None:
        """Bring the file up to date. If that fails, the next call tries again."""
        if not (self._pending or self._outdated):
            return
        try:
            if self._outdated or not self._append(b"".join(self._pending)):
                self._rewrite()
        except OSError as error:
            self.fault = f"{self._path} cannot be written: {error.strerror or error}"
            return
        self._pending, self._outdated, self.fault = [], False, ""

    def _append(self, data: bytes) -> bool:
        """Append to the file. Returns False if it lacks what was written before: somebody deleted or emptied it."""
        with self._path.open("ab", buffering=0) as file:
            if file.tell() < self._length:
                return False
            file.truncate(self._length)  # part of a line, from an attempt before
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
        self._length += len(data)
        return True

    def _rewrite(self) -> None:
        fresh, data = self._path.with_suffix(".new"), b"".join(map(_line, self.rows.values()))
        fresh.write_bytes(data)
        fresh.replace(self._path)
        self._length = len(data)


def _line(row: Record) -> bytes:
    return msgspec.json.encode(row) + b"\n"


class RunRecords:
    """The files of a run's steps and of its evaluation rounds, which are undone together by a restore."""

    def __init__(self, folder: RunPaths) -> None:
        self.steps, self.rounds = Mirror(folder.metrics), Mirror(folder.evaluations, EVALUATED)

    @property
    def fault(self) -> str:
        """Why a file lacks records; "" if both have all."""
        return self.steps.fault or self.rounds.fault

    def add(self, poll: Poll) -> tuple[list[Record], list[Record]]:
        """Append what a poll found, and return the new steps and rounds."""
        steps, rounds = self.steps.add(poll.records), self.rounds.add(poll.evaluations)
        self.rounds.outlive(self.steps)
        return steps, rounds
