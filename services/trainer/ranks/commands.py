"""Keeps the ranks in lockstep: rank 0 names the next operation and all perform it.

Guarantees: every rank performs the same operations in the same order, so their collectives always match.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from services.trainer import ranks

Operation = Callable[[Any], object]


class RankCommands:
    """Holds this rank's operations by name; `wait` and `end` are built in."""

    def __init__(self, operations: Mapping[str, Operation]) -> None:
        self._operations = dict(operations)
        self._in_step = True  # whether the others wait for rank 0's next command

    def lead(self, name: str, argument: Any = 0) -> object:
        """Rank 0: run `name` on all ranks. Returns this rank's result."""
        ranks.from_rank_0((name, argument))
        self._in_step = False
        result = self._operations[name](argument)
        self._in_step = True
        return result

    def keep_waiting(self) -> None:
        """Rank 0: notify the others that there is nothing to do yet, before their collective times out."""
        ranks.from_rank_0(("wait", 0))
        self._in_step = True

    def dismiss(self) -> None:
        """Rank 0: let the others exit.

        After a failed operation they may be waiting inside it, where no command reaches them; their collective then ends when
        rank 0 exits.
        """
        if self._in_step:
            ranks.from_rank_0(("end", 0))

    def follow(self) -> None:
        """Other ranks: perform rank 0's commands until `end`."""
        while True:
            name, argument = ranks.from_rank_0(("", 0))
            if name == "end":
                return
            if name != "wait":
                self._operations[name](argument)
