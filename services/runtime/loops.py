"""Supervised background loops.

Guarantees: a loop that fails is logged with its traceback, counted, and restarted after a growing pause; a loop that makes no
progress within its own limit fails the process's liveness check; an error that a retry cannot fix ends the process with its
one-line message.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import structlog

from services.config import ConfigError
from services.protocol.errors import DifferentRun

log = structlog.get_logger()

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
CANCEL_AGAIN_S = 0.5


class Fatal(Exception):
    """The process cannot do its work and a restart would not help; the message says why and what to do."""


class Broken(Exception):
    """The process cannot continue, but a new one can take its place."""


FATAL = (Fatal, Broken, ConfigError, DifferentRun)


@dataclass
class Loop:
    """A loop: `body` runs until it returns. It calls `progress` whenever it makes progress, which includes idle waits."""

    name: str
    body: Callable[[Loop], Awaitable[None]]
    limit_s: float
    failures: int = 0
    last_progress: float = field(default_factory=time.monotonic)

    def progress(self) -> None:
        """Report that the loop is alive."""
        self.last_progress = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Return the seconds since the last progress."""
        return time.monotonic() - self.last_progress

    @property
    def alive(self) -> bool:
        """Return whether the loop made progress within its limit."""
        return self.silent_s <= self.limit_s

    async def supervise(self) -> None:
        """Run the body to its end, restarting it after each failure."""
        pause_s = FIRST_PAUSE_S
        while True:
            started = time.monotonic()
            try:
                await self.body(self)
                return
            except FATAL:
                raise
            except Exception as error:  # a supervised loop may fail in any way: log, count, restart
                self.failures += 1
                if time.monotonic() - started > 10 * LONGEST_PAUSE_S:
                    pause_s = FIRST_PAUSE_S
                log.warning("loop failed, restarting it", loop=self.name, error=str(error), pause_s=pause_s, exc_info=True)
                self.progress()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def after(ready: asyncio.Event, body: Callable[[Loop], Awaitable[None]]) -> Callable[[Loop], Awaitable[None]]:
    """Return a loop that begins when `ready` is set; until then it has no progress to report."""

    async def run(loop: Loop) -> None:
        limit_s, loop.limit_s = loop.limit_s, float("inf")
        await ready.wait()
        loop.progress()
        loop.limit_s = limit_s
        await body(loop)

    return run


async def is_set_within(event: asyncio.Event, limit_s: float) -> bool:
    """Return whether an event is set within so many seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):  # `wait_for` of Python 3.11 may swallow a cancellation
            await event.wait()
    return event.is_set()


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they are done, repeating the cancellation, even if this call is cancelled meanwhile.

    Before Python 3.12, `asyncio.wait_for` loses a cancellation that arrives together with its result, and redis-py sends with it.
    """
    ending, interrupted = set(tasks), None
    while pending := {task for task in ending if not task.done()}:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
        except asyncio.CancelledError as error:  # a task that is left would work on, with parts that are closed
            interrupted = error
    for task in ending:
        if not task.cancelled():
            task.exception()  # mark it as seen; awaiting the task still raises it
    if interrupted is not None:
        raise interrupted
