"""Time limits of a weight transfer, and its end after a failure."""

from __future__ import annotations

import threading
import time
import traceback
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


def let_go(error: BaseException) -> None:
    """Release what the stack frames of a failed transfer hold.

    The other ranks learn of the failure when the group ends, and a group ends when its last reference is dropped. The error's
    traceback, which may be part of a cycle, must not keep one.
    """
    traceback.clear_frames(error.__traceback__)
