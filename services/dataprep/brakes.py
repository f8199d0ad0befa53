"""What keeps the leader from issuing prompts: a Redis that is nearly full, and prompts that fail one after another.

Guarantees: the last tenth of the server's `maxmemory` is reserved for work in progress. A broken
reward or environment does not use up the prompts: after as many failures in a row as the run has slots, dataprep pauses itself. A
prompt that is generated and scored resets the count, whatever becomes of its group; so does the pause. A new leader continues the
count: it reads it from the dead letters, of which about 10,000 are kept. The pause is requested once, and names the last failure.
The prompts stay in the dead letters, from which they can be requeued.
"""

from __future__ import annotations

import time

import structlog

from services.config import RunConfig
from services.runtime.exits import one_line
from services.store import Store

log = structlog.get_logger()

FULL, ROOM = 0.9, 0.85
"""Shares of the limit in use. At the first, issuing stops; it resumes below the second."""

POLL_S = 1.0

REMEDY = "lower replay.capacity or checkpoint.every_steps, or raise the server's maxmemory"

LEAST = 16  # in a run with few slots: if one prompt in four fails by chance, so many in a row take four billion prompts


class MemoryGuard:
    """Watches the server's memory for the leader."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._looked = float("-inf")
        self.why = ""
        """Why no prompt is issued, or empty."""

    async def full(self) -> bool:
        """Return whether to stop issuing. Asks the server at most once a second."""
        if time.monotonic() - self._looked < POLL_S:
            return bool(self.why)
        self._looked = time.monotonic()
        used, limit = await self._store.run.memory()
        if limit and used >= (ROOM if self.why else FULL) * limit:
            if not self.why:
                log.warning("Redis is nearly full: no prompts are issued until a checkpoint frees memory", remedy=REMEDY)
            self.why = f"Redis uses {used >> 20} of {limit >> 20} MiB: {REMEDY}"
        elif self.why:
            log.info("Redis has free memory again")
            self.why = ""
        return bool(self.why)


class Failures:
    """Counts the prompts that failed since the last one that did not."""

    def __init__(self, store: Store, config: RunConfig) -> None:
        """Failures in a row that pause the run.

        After as many as the run has slots, none of the prompts in progress was generated.
        """
        self._store = store
        self._limit = max(LEAST, config.slots)
        self._before: int | None = None  # failures at the time of the last success; None: the number now
        self._known = False  # whether that is known; a new leader does not know it

    def forget(self) -> None:
        """Start to lead: another process may have led in between."""
        self._known = False

    def succeeded(self) -> None:
        """Note that a group was generated and scored."""
        self._before = None

    async def pause(self) -> bool:
        """Pause dataprep if too many failed in a row, and return whether it was."""
        letters = 0 if self._known else len(await self._store.dead_letters.in_a_row(since_pause=True))
        failed = await self._store.run.failed()
        if not self._known:
            self._before, self._known = failed - letters, True
        self._before = failed if self._before is None else min(self._before, failed)  # they can be requeued
        in_a_row = failed - self._before
        if in_a_row < self._limit:
            return False
        newest = await self._store.dead_letters.page(1)
        reason = one_line(newest[0].reason) if newest else ""
        log.error("pausing, because one prompt after another fails", failed=in_a_row, reason=reason)
        self._before = None
        await self._store.run.pause_failing(f"{in_a_row} in a row, the last one with: {reason}", newest[0].id if newest else "")
        return True
