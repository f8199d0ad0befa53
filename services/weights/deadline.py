"""Time limits of a weight transfer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Self


class Deadline:
    """A point in time that all waits of one operation share."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> timedelta:
        """Return the time left. Raises `TimeoutError` if none is."""
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the deadline of the weight transfer has passed")
        return timedelta(seconds=max(seconds, 0.001))


class Abort:
    """Interrupts calls that would wait forever: `with Abort(seconds, end) as abort:` calls `end` in a thread after `seconds`,
    unless the block has ended.

    The block is left only after `end` has returned; `abort.passed` is set before `end` is called.
    """

    def __init__(self, seconds: float, end: Callable[[], object]) -> None:
        self.passed = False
        self._end = end
        self._timer = threading.Timer(seconds, self._expire)

    def _expire(self) -> None:
        self.passed = True
        self._end()

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()
