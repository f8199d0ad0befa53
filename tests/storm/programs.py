"""The environment of a storm: its tool and turns record every call, with the number of the turn."""

from __future__ import annotations

import inspect
import os
import time
from typing import Any

LOOK = "look.py"
"""Name of a file beside the notes with what code in a sandbox calls."""


def looking(path: str) -> str:
    """Return a function that notes and returns what `Noted.look` does, as code that needs nothing of this repository."""
    return f"import os, time\n{inspect.getsource(note)}\ndef look(n):\n    note({path!r}, 'tool', n)\n    print(n % 97)\n"


def note(path: str, what: str, number: int) -> None:
    """Append a line atomically, even from several processes."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{what} {number} {time.time_ns()}\n".encode())
    os.close(file)


class Noted:
    """Has a tool that must not run twice for a turn; it can be restored."""

    tools = ["look"]

    def __init__(self, log: str) -> None:
        self.log, self.said = log, 0

    def look(self, n: int) -> int:
        """Look something up."""
        note(self.log, "tool", n)
        return n % 97

    def turn(self, message: dict[str, Any]) -> None:
        number = message["content"].rpartition(" ")[2]
        self.said = int(number) if number.isdigit() else 0
        note(self.log, "end", self.said)

    def score(self) -> float:
        return float(self.said % 2)

    def snapshot(self) -> int:
        return self.said

    def restore(self, state: int) -> None:
        self.said = state
