"""An event loop in a thread of its own, for processes whose main thread must block in collectives.

Guarantees: `call` runs a coroutine on that loop and returns or raises what it does; `close` ends the loop in order.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Portal:
    """The way from a blocking thread into an event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="portal", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop and wait for it, `timeout` seconds at most."""
        future = self.start(work)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the loop; the future tells when it is done."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        """Stop the loop and its thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
