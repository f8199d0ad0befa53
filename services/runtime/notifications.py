"""Wake-ups from Redis pub/sub.

Guarantees: a notification is a hint and never the state itself, so a lost one costs at most the caller's own timeout. A waiter
never misses a notification that arrives between its last poll of the state and its wait, because notifications are remembered
until waited for.
Waits for: messages on the run's notifications channel. Unblocks: every loop that waits for its topic.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from services.store import Store


class Notifications:
    """Notifications of one process, by topic. A waiter is identified by the topics it names: no two loops wait for the same
    ones.
    """

    def __init__(self) -> None:
        self._rung: Counter[str] = Counter()
        self._heard: dict[tuple[str, ...], int] = {}  # by waiter: notifications of its topics up to its last wait
        self._waiting: dict[tuple[str, ...], asyncio.Event] = {}

    async def listen(self, store: Store, few: bool = True) -> None:
        """Pass notifications on, including those for `few`, until the connection breaks.

        A new connection notifies every topic, because notifications may have been missed.
        """
        async for topic in store.monitor.listen(few):
            if topic == "connected":
                self.notify_all()
            else:
                self.notify(topic)

    def notify(self, topic: str) -> None:
        """Notify a topic of this process."""
        self._rung[topic] += 1
        for topics, event in self._waiting.items():
            if topic in topics:
                event.set()

    def notify_all(self) -> None:
        """Notify every topic that has a waiter."""
        for topic in {topic for topics in self._heard for topic in topics}:
            self.notify(topic)

    async def wait(self, *topics: str, timeout: float) -> None:
        """Return on a notification of any of `topics`, including one since this waiter's last wait, or after `timeout`
        seconds.
        """
        if self._total(topics) == self._heard.setdefault(topics, 0):
            event = self._waiting[topics] = asyncio.Event()
            try:
                async with asyncio.timeout(timeout):
                    await event.wait()
            except TimeoutError:
                pass  # a timeout is a result too
            finally:
                self._waiting.pop(topics, None)
        self._heard[topics] = self._total(topics)

    def _total(self, topics: tuple[str, ...]) -> int:
        return sum(self._rung[topic] for topic in topics)
