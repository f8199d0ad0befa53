"""Stops issuing prompts when Redis may have no memory for their groups.

Guarantees: the last tenth of the server's `maxmemory` is reserved for work in progress; a leader that waits says why.
"""

from __future__ import annotations

import time

import structlog

from services.store import Store

log = structlog.get_logger()

FULL, ROOM = 0.9, 0.85
"""Shares of the limit in use. At the first, issuing stops; it resumes below the second."""

POLL_S = 1.0


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


REMEDY = "lower replay.capacity or checkpoint.every_steps, or raise the server's maxmemory"
