"""The records of a run, each number once, even if steps were retrained after a restore.

Guarantees: for each number it keeps the first record of the run's last incarnation. After a restore to a checkpoint, new records
replace all earlier ones from that step on. Evaluation rounds follow the steps: a round of a policy version that the new
incarnation replaces is removed, even if the new incarnation does not evaluate that version.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

INCARNATION = "run/incarnation"
STEP, EVALUATED = "step", "eval/version"
"""Keys that number the records of training steps, and of evaluation rounds."""
MAX_NUMBER = 2**53
"""Integers up to here are exact in every program that writes JSON."""

T = TypeVar("T")


class History(Generic[T]):
    """Records numbered by `key`. `keep` selects the part of each record to keep."""

    def __init__(self, key: str, keep: Callable[[Mapping[str, float]], T]) -> None:
        self.key, self._keep = key, keep
        self.rows: dict[int, T] = {}
        self.incarnation = 0.0
        self._lives: dict[int, float] = {}  # number -> incarnation of its row
        self._first: dict[float, int] = {}  # incarnation -> its first number

    def begin(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Load rows that were kept before."""
        for row in rows:
            self._put(int(row[self.key]), row)
            self.incarnation = max(self.incarnation, row.get(INCARNATION, 0.0))

    def add(self, record: Mapping[str, Any]) -> tuple[bool, bool]:
        """Add a record. Return whether it is new, and whether it removed others from its number on. One without a number, which
        another program wrote or which is damaged, is left out.
        """
        if not is_number(record.get(self.key)) or not is_number(record.get(INCARNATION, 0.0)):
            return False, False
        number, incarnation, forgot = int(record[self.key]), record.get(INCARNATION, 0.0), False
        if incarnation < self.incarnation:
            return False, False  # a late record of an undone incarnation
        if incarnation > self.incarnation:
            self.incarnation = incarnation
            forgot = self._forget([held for held in self.rows if held >= number])
        if number in self.rows:
            return False, forgot
        self._put(number, record)
        return True, forgot

    def outlive(self, steps: History[Any]) -> bool:
        """Remove the policy versions that `steps` has replaced. Return whether there were any.

        An incarnation that begins at step s starts from version s of an earlier one; later versions are its own.
        """
        begun = steps._first.items()
        return self._forget(
            [version for version, life in self._lives.items() if any(later > life and version > s for later, s in begun)]
        )

    def _put(self, number: int, record: Mapping[str, float]) -> None:
        life = record.get(INCARNATION, 0.0)
        self.rows[number], self._lives[number] = self._keep(record), life
        self._first[life] = min(number, self._first.get(life, number))

    def _forget(self, numbers: Sequence[int]) -> bool:
        for number in numbers:
            del self.rows[number], self._lives[number]
        return bool(numbers)


def is_number(value: object) -> bool:
    """Return whether a value can number a record."""
    return isinstance(value, int | float) and abs(value) < MAX_NUMBER


def history_of(path: Path, key: str, keep: Callable[[Mapping[str, float]], T]) -> History[T]:
    """Return the records of a file with one per line."""
    history = History(key, keep)
    for record in recorded(path):
        history.add(record)
    return history


def recorded(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file with one per line, e.g. `metrics.jsonl`. A missing file has none; a torn line is left out."""
    with contextlib.suppress(OSError):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    yield record
