"""Notices every Ctrl-C of a starting command, in every thread. Python prints and ignores the exception if one arrives in a
finalizer or in a fork hook, and a starting run forks a lot.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any, NoReturn, Self, TypeVar

T = TypeVar("T")


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


class Work:
    """Coroutines that run in other threads, which Ctrl-C does not reach, until they are done or cancelled."""

    def __init__(self) -> None:
        self._cancelled, self._tasks = False, set[asyncio.Task[Any]]()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in this thread. Raises `asyncio.CancelledError`."""

        async def noted() -> T:
            task = asyncio.create_task(work)
            self._tasks.add(task)
            if self._cancelled:
                task.cancel()
            return await task

        return asyncio.run(noted())

    def cancel(self) -> None:
        """Cancel what runs, and what is yet to run."""
        self._cancelled = True
        for task in list(self._tasks):
            with contextlib.suppress(RuntimeError):  # its event loop is closed
                task.get_loop().call_soon_threadsafe(task.cancel)
