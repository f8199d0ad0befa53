"""Supervised background loops.

Guarantees: a loop that fails is logged with its traceback, counted, and started again after a growing pause; a loop that
makes no progress within its own limit turns the process's liveness red; an error that no retry can mend ends the process
with its one-line message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import structlog

from services.config import ConfigError
from services.protocol.errors import DifferentRun

log = structlog.get_logger()

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
CANCEL_AGAIN_S = 0.5


class Fatal(Exception):
    """The process cannot do its work and a restart would not help; the message says why and what to do."""


class Broken(Exception):
    """The process cannot go on, but a new one can take its place."""


FATAL = (Fatal, Broken, ConfigError, DifferentRun)


@dataclass
class Loop:
    """A loop: `body` runs until it returns; it calls `progress` whenever it has got somewhere, idle waits included."""

    name: str
    body: Callable[[Loop], Awaitable[None]]
    limit_s: float
    failures: int = 0
    last_progress: float = field(default_factory=time.monotonic)

    def progress(self) -> None:
        """Say that the loop is alive."""
        self.last_progress = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self.last_progress

    @property
    def alive(self) -> bool:
        """Whether the loop made progress within its limit."""
        return self.silent_s <= self.limit_s

    async def supervise(self) -> None:
        """Run the body to its end, again after each failure."""
        pause_s = FIRST_PAUSE_S
        while True:
            started = time.monotonic()
            try:
                await self.body(self)
                return
            except FATAL:
                raise
            except Exception as error:  # a loop that is supervised may break in any way: logged, counted, begun again
                self.failures += 1
                if time.monotonic() - started > 10 * LONGEST_PAUSE_S:
                    pause_s = FIRST_PAUSE_S
                log.warning("loop failed, starting it again", loop=self.name, error=str(error), pause_s=pause_s, exc_info=True)
                self.progress()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def end_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait until they are done, asking again.

    Before Python 3.12 `asyncio.wait_for` forgets a cancellation that comes as its result does, and redis-py sends with it.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
        for task in done:
            if not task.cancelled():
                task.exception()  # seen; whoever awaits the task gets it too
