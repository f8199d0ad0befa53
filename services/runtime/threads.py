"""Runs a function that may take long in a thread of its own, beside the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Return what the function returns, or raise what it raises; RuntimeError for StopIteration, as a coroutine does.

    A cancelled call leaves the function running, but unlike `asyncio.to_thread`, it does not keep the process from ending.
    """
    result: Future[T] = Future()
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
    return await asyncio.wrap_future(result)
