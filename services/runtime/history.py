"""The records of a run as they stand: each number once, whatever was trained again or taken back.

Guarantees: a number has the first record of it that was made in the run's last life; when the run was taken back to a checkpoint,
what it records anew takes the place of what it had recorded from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

INCARNATION = "run/incarnation"
STEP, EVALUATED = "step", "eval/version"
"""What numbers the records of training steps, and of evaluation rounds."""

T = TypeVar("T")


class History(Generic[T]):
    """Records, numbered by `key`, of which `keep` is kept."""

    def __init__(self, key: str, keep: Callable[[Mapping[str, float]], T]) -> None:
        self.key, self._keep = key, keep
        self.rows: dict[int, T] = {}
        self.incarnation = 0.0

    def begin(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Take in rows that stand already."""
        for row in rows:
            self.rows[int(row[self.key])] = self._keep(row)
            self.incarnation = max(self.incarnation, row.get(INCARNATION, 0.0))

    def add(self, record: Mapping[str, Any]) -> tuple[bool, bool]:
        """Take in a record: whether it is new, and whether others from its number on were forgotten for it."""
        number, incarnation, forgot = int(record[self.key]), record.get(INCARNATION, 0.0), False
        if incarnation < self.incarnation:
            return False, False  # a late word of what was undone
        if incarnation > self.incarnation:
            self.incarnation = incarnation
            forgot = any(held >= number for held in self.rows)
            if forgot:
                self.rows = {held: row for held, row in self.rows.items() if held < number}
        if number in self.rows:
            return False, forgot
        self.rows[number] = self._keep(record)
        return True, forgot
