"""How the ranks act as one: rank 0 says what comes next, all do it.

Guarantees: every rank performs the same operations in the same order, so their collectives always match.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.trainer import ranks

Operation = Callable[[int], object]


class RankCommands:
    """The operations of this rank by name; `wait` and `end` are built in."""

    def __init__(self, operations: Mapping[str, Operation]) -> None:
        self._operations = dict(operations)
        self._in_step = True  # whether the others wait for rank 0's next word

    def lead(self, name: str, argument: int = 0) -> object:
        """Rank 0: have all ranks do `name`; returns this rank's result."""
        ranks.from_rank_0((name, argument))
        self._in_step = False
        result = self._operations[name](argument)
        self._in_step = True
        return result

    def keep_waiting(self) -> None:
        """Rank 0: tell the others that there is nothing to do yet, before their collective times out."""
        ranks.from_rank_0(("wait", 0))
        self._in_step = True

    def dismiss(self) -> None:
        """Rank 0: the others may go. After an operation that failed they may be waiting inside it, where no word reaches them:
        then rank 0's own end is what ends their collective."""
        if self._in_step:
            ranks.from_rank_0(("end", 0))

    def follow(self) -> None:
        """Other ranks: do what rank 0 says until it says `end`."""
        while True:
            name, argument = ranks.from_rank_0(("", 0))
            if name == "end":
                return
            if name != "wait":
                self._operations[name](argument)
