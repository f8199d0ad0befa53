"""Notices every Ctrl-C of a starting command. Python prints and ignores the exception if one arrives in a finalizer or in a fork
hook, and a starting run forks a lot.
"""

from __future__ import annotations

import signal
from typing import Any, NoReturn, Self


class Interrupts:
    """Remembers whether Ctrl-C was pressed while it is entered, and raises `KeyboardInterrupt` as Python does."""

    def __enter__(self) -> Self:
        self._pressed = False
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if the exception of a Ctrl-C was ignored."""
        if self._pressed:
            raise KeyboardInterrupt

    def _press(self, *_: Any) -> NoReturn:
        self._pressed = True
        raise KeyboardInterrupt
