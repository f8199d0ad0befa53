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
from typing import Any, Generic, TypeGuard, TypeVar

import msgspec

INCARNATION = "run/incarnation"
STEP, EVALUATED = "step", "eval/version"
"""Keys that number the records of training steps, and of evaluation rounds."""
MAX_NUMBER = 2**53
"""Integers up to here are exact in every program that writes JSON."""

T = TypeVar("T")


class Cursor(msgspec.Struct):
    """The last numbered record that was taken. Each incarnation of a run begins at a number of its own."""

    number: int = -1
    incarnation: float = 0.0

    def takes(self, record: Mapping[str, Any], key: str) -> bool:
        """Return whether a record is new, and remember it. A step that is retrained after a crash is recorded again, and not new;
        neither is one without a number, which another program wrote or which is damaged.
        """
        number, incarnation = record.get(key), record.get(INCARNATION, 0.0)
        if not is_number(number) or not is_number(incarnation) or incarnation < self.incarnation:
            return False
        if incarnation == self.incarnation and number <= self.number:
            return False
        self.number, self.incarnation = int(number), incarnation
        return True


class History(Generic[T]):
    """Records numbered by `key`. `keep` selects the part of each record to keep."""

    def __init__(self, key: str, keep: Callable[[Mapping[str, float]], T]) -> None:
        self.key, self._keep = key, keep
        self.rows: dict[int, T] = {}
        self._cursor = Cursor()
        self._lives: dict[int, float] = {}  # number -> incarnation of its row
        self._first: dict[float, int] = {}  # incarnation -> its first number

    @property
    def incarnation(self) -> float:
        """Return the run's last incarnation."""
        return self._cursor.incarnation

    def begin(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Load rows that were kept before."""
        for row in rows:
            self._cursor.takes(row, self.key)
            self._put(int(row[self.key]), row)

    def add(self, record: Mapping[str, Any]) -> tuple[bool, bool]:
        """Add a record. Return whether it is new, and whether it removed others from its number on."""
        if not self._cursor.takes(record, self.key):
            return False, False
        number = self._cursor.number
        forgot = self._forget([held for held in self.rows if held >= number])
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


def is_number(value: object) -> TypeGuard[float]:
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
