"""An event loop in its own thread, for processes whose main thread must block in collectives.

Guarantees: `call` runs a coroutine on that loop and returns or raises what it does; `close` shuts the loop down in order.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from services.runtime.loops import end_tasks

T = TypeVar("T")

END_S = 5.0
"""How long the tasks of a closing loop may take to end."""


class Portal:
    """Calls from a blocking thread into an event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="portal", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop and wait for it, at most `timeout` seconds."""
        future = self.start(work)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the loop; the future completes when it is done."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        """Cancel what still runs on the loop, waiting up to `END_S`; stop the loop and its thread."""

        async def end() -> None:
            await end_tasks(asyncio.all_tasks() - {asyncio.current_task()})

        with contextlib.suppress(TimeoutError):
            self.call(end(), END_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
