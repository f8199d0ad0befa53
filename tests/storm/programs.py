"""The environment of a storm: its tool and its turns record every call, with the number of the turn."""

from __future__ import annotations

import os
import time
from typing import Any


def note(path: str, what: str, number: int) -> None:
    """Append a line atomically, even with several processes writing."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{what} {number} {time.time_ns()}\n".encode())
    os.close(file)


class Noted:
    """Has a tool that must not run twice for a turn, and can be restored."""

    tools = ["look"]

    def __init__(self, log: str) -> None:
        self.log, self.number = log, 0

    def look(self, n: int) -> int:
        """Look something up."""
        note(self.log, "tool", n)
        return n % 97

    def turn(self, message: dict[str, Any]) -> None:
        number = message["content"].rpartition(" ")[2]
        self.number = int(number) if number.isdigit() else 0
        note(self.log, "end", self.number)

    def score(self) -> float:
        return float(self.number % 2)

    def snapshot(self) -> int:
        return self.number

    def restore(self, state: int) -> None:
        self.number = state
