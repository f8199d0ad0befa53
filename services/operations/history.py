"""The records of a run as they stand: each number once, whatever was trained again or taken back.

Guarantees: a number has the first record of it that was made in the run's last life; when the run was taken back to a checkpoint,
what it records anew takes the place of what it had recorded from there on. Evaluation rounds follow the steps: one of a version
that the new life makes anew is gone, whether the new life evaluates that version or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
        self._lives: dict[int, float] = {}  # number -> incarnation of its row
        self._first: dict[float, int] = {}  # incarnation -> its first number

    def begin(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Take in rows that stand already."""
        for row in rows:
            self._put(int(row[self.key]), row)
            self.incarnation = max(self.incarnation, row.get(INCARNATION, 0.0))

    def add(self, record: Mapping[str, Any]) -> tuple[bool, bool]:
        """Take in a record: whether it is new, and whether others from its number on were forgotten for it."""
        number, incarnation, forgot = int(record[self.key]), record.get(INCARNATION, 0.0), False
        if incarnation < self.incarnation:
            return False, False  # a late word of what was undone
        if incarnation > self.incarnation:
            self.incarnation = incarnation
            forgot = self._forget([held for held in self.rows if held >= number])
        if number in self.rows:
            return False, forgot
        self._put(number, record)
        return True, forgot

    def outlive(self, steps: History[Any]) -> bool:
        """Forget the policy versions here that `steps` made anew; whether there were any.

        A life that begins at step s goes on from version s of an earlier one; later versions are its own.
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
