"""Coroutines of checks that run in threads of their own, and can be cancelled from the main thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


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
