"""Between event loops and threads: a loop in its own thread, for processes whose main thread must block in collectives, and
slow functions in threads of their own.

Guarantees: `call` runs a coroutine on that loop and returns or raises what it does; `close` shuts the loop down in order.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine
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


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Return what the function returns, or raise what it raises; RuntimeError for StopIteration, as a coroutine does.

    A cancelled call leaves the function running, but unlike `asyncio.to_thread`, it does not keep the process from ending.
    """
    return await asyncio.wrap_future(begin_in_thread(function))


def begin_in_thread(function: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Call a function in a thread that does not keep the process from ending, and return its future result."""
    result: concurrent.futures.Future[T] = concurrent.futures.Future()
    result.set_running_or_notify_cancel()  # from here on the thread may set it, even if nobody waits for it any longer
    context = contextvars.copy_context()

    def run() -> None:
        try:
            result.set_result(context.run(function))
        except StopIteration as error:  # which a future refuses, so that the caller would wait for ever
            wrapped = RuntimeError("the function raised StopIteration")
            wrapped.__cause__ = error
            result.set_exception(wrapped)
        except BaseException as error:  # raised where the result is awaited
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result
