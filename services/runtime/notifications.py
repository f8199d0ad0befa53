"""Wake-ups from Redis pub/sub.

Guarantees: a ring is a hint and never the truth, so a lost one costs at most the caller's own timeout. A waiter never
misses a ring that comes between its last look at the state and its wait, because rings are remembered until waited for.
Waits for: messages on the run's notifications channel. Unblocks: every loop that waits for its topic.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from services.store import Store


class Notifications:
    """Rings of one process, by topic. A waiter is known by the topics it names: two loops never wait for the same ones."""

    def __init__(self) -> None:
        self._rung: Counter[str] = Counter()
        self._heard: dict[tuple[str, ...], int] = {}  # by waiter: rings of its topics up to its last wait
        self._waiting: dict[tuple[str, ...], asyncio.Event] = {}

    async def listen(self, store: Store, few: bool = True) -> None:
        """Pass rings on, those for `few` too, until the connection breaks; a new connection rings everything, as any ring may
        have been missed."""
        async for topic in store.monitor.listen(few):
            if topic == "connected":
                self.notify_all()
            else:
                self.notify(topic)

    def notify(self, topic: str) -> None:
        """Ring a topic of this process."""
        self._rung[topic] += 1
        for topics, event in self._waiting.items():
            if topic in topics:
                event.set()

    def notify_all(self) -> None:
        """Ring every topic somebody waits for."""
        for topic in {topic for topics in self._heard for topic in topics}:
            self.notify(topic)

    async def wait(self, *topics: str, timeout: float) -> None:
        """Return at a ring of any of `topics`, one since this waiter's last wait included, or after `timeout` seconds."""
        if self._total(topics) == self._heard.setdefault(topics, 0):
            event = self._waiting[topics] = asyncio.Event()
            try:
                async with asyncio.timeout(timeout):
                    await event.wait()
            except TimeoutError:
                pass  # silence is an answer too
            finally:
                self._waiting.pop(topics, None)
        self._heard[topics] = self._total(topics)

    def _total(self, topics: tuple[str, ...]) -> int:
        return sum(self._rung[topic] for topic in topics)
