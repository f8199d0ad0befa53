"""Wake-ups from Redis pub/sub.

Guarantees: a ring is a hint and never the truth, so a lost one costs at most the caller's own timeout. A waiter never
misses a ring that comes between its last look at the state and its wait, because rings are remembered until waited for.
Waits for: messages on the run's bell channel. Unblocks: every loop that waits for its topic.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from services.protocol.store import Store


class Bell:
    """Named events of one process."""

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def listen(self, store: Store) -> None:
        """Pass rings on, until the connection breaks; a new connection rings everything, as any ring may have been missed."""
        async for topic in store.listen():
            if topic == "connected":
                self.ring_all()
            else:
                self._events[topic].set()

    def ring(self, topic: str) -> None:
        """Ring a topic of this process."""
        self._events[topic].set()

    def ring_all(self) -> None:
        """Ring every topic somebody waits for."""
        for event in list(self._events.values()):
            event.set()

    async def wait(self, *topics: str, timeout: float) -> None:
        """Return at a ring of any of `topics`, one that came since the last wait included, or after `timeout` seconds."""
        events = [self._events[topic] for topic in topics]
        if not any(event.is_set() for event in events):
            waits = [asyncio.ensure_future(event.wait()) for event in events]
            try:
                await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        for event in events:
            event.clear()
