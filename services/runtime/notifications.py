"""Wake-ups from Redis pub/sub.

Guarantees: a notification is a hint and never the state itself, so a lost one costs at most the caller's own timeout. A waiter
never misses a notification that arrives between its last poll of the state and its wait, because notifications are remembered
until waited for. A process receives only the topics that something in it has waited for.
Waits for: messages on the channels of these topics. Unblocks: every loop that waits for a topic.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from services.protocol.keys import TOPICS
from services.runtime.loops import is_set_within
from services.store import Store
from services.store.monitor import TopicSubscription


class Notifications:
    """Notifications of one process, by topic: those of Redis, and its own. A waiter is identified by the topics it names: no two
    loops wait for the same ones.
    """

    def __init__(self) -> None:
        self._rung: Counter[str] = Counter()
        self._heard: dict[tuple[str, ...], int] = {}  # by waiter: notifications of its topics up to its last wait
        self._waiting: dict[tuple[str, ...], asyncio.Event] = {}
        self._topics = {"control"}  # of Redis, to subscribe to
        self._subscription: TopicSubscription | None = None

    async def listen(self, store: Store) -> None:
        """Pass notifications on until the connection breaks and cannot be restored.

        A topic is also notified whenever its subscription begins, even on a new connection: notifications may have been missed.
        """
        async with store.monitor.listening() as subscription:
            subscription.add(*self._topics)
            self._subscription = subscription
            try:
                async for topic in subscription:
                    self.notify(topic)
            finally:
                self._subscription = None

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
        heard = self._heard.setdefault(topics, 0)
        missing = {topic for topic in topics if topic in TOPICS} - self._topics
        self._topics |= missing
        if missing and self._subscription is not None:  # they are notified when their subscription begins
            self._subscription.add(*missing)
        if self._total(topics) == heard:
            event = self._waiting[topics] = asyncio.Event()
            try:
                await is_set_within(event, timeout)
            finally:
                self._waiting.pop(topics, None)
        self._heard[topics] = self._total(topics)

    def _total(self, topics: tuple[str, ...]) -> int:
        return sum(self._rung[topic] for topic in topics)
