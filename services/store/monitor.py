"""What operators monitor: step metrics, sizes, the server, notifications."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from services.store.connection import Connection
from services.store.facet import Facet
from services.store.run import fullest

METRICS_KEPT = 100_000  # entries of the metrics stream, each of some 4 kB


@dataclass(frozen=True)
class Sizes:
    """Sizes in addition to what `audit` counts."""

    claimed: int  # tickets that a generator holds
    oldest_ticket_s: float  # age of the oldest ticket that was not submitted; 0: none
    replay_groups: int
    dead_letters: int


@dataclass(frozen=True)
class Server:
    """State of the Redis server; with payload shards, of the fullest of several."""

    used_memory: int  # bytes
    max_memory: int  # bytes; 0: no limit
    clients: int  # the highest of all servers
    persists: bool  # whether its last append-only write succeeded, or it keeps no such file; true only if true of all servers


class TopicSubscription:
    """Topics as they change. A hint, never the state itself.

    Only one task at a time uses the connection: redis-py cannot have two that find it broken and connect again.
    """

    def __init__(self, redis: Connection, channels: Any) -> None:
        self._redis, self._channels = redis, channels
        self._added = list[str]()
        """Topics to subscribe to."""
        self._reading: asyncio.Timeout | None = None
        """The wait for the next message."""

    def add(self, *topics: str) -> None:
        """Subscribe to topics. The task that iterates does it, at once if it waits for a message."""
        self._added += topics
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.reschedule(asyncio.get_running_loop().time())

    async def __aiter__(self) -> AsyncIterator[str]:
        """Yield the topics that were added: each whenever it changes, and whenever its subscription begins (also on a new
        connection), because an earlier change may have been missed.
        """
        while True:
            if added := self._added:
                self._added = []
                await self._redis.ask(self._channels.subscribe(*map(self._redis.keys.notifications, added)))
            if message := await self._next():
                yield message["channel"].decode().rpartition(":")[2]

    async def _next(self) -> dict[str, Any] | None:
        """Return the next message, or None after a second or if topics are added."""
        try:
            async with asyncio.timeout(None) as self._reading:
                return await self._redis.ask(self._channels.get_message(timeout=1.0))
        except TimeoutError:
            return None
        finally:
            self._reading = None


class Monitor(Facet):
    """Reads for monitoring, and `record`."""

    async def record(self, metrics: dict[str, float]) -> None:
        """Append the metrics of a step to the capped stream."""
        await self._redis.call("record", msgspec.json.encode(metrics), METRICS_KEPT)

    async def metrics(self, after: str = "-", count: int = 1000) -> list[tuple[str, dict[str, float]]]:
        """Return entries of the metrics stream after an entry id, oldest first."""
        return await self._records(self._keys.metrics, after, count)

    async def last_record(self) -> dict[str, float]:
        """Return the last entry of the metrics stream; {}: there is none."""
        entries = await self._redis.ask(self._redis.client.xrevrange(self._keys.metrics, count=1))
        return msgspec.json.decode(entries[0][1][b"m"]) if entries else {}

    async def sizes(self) -> Sizes:
        """Return sizes of the run, each read by a short command."""
        claimed, queued, rollouts, groups, letters, (seconds, micros) = await self._redis.send(
            ("HLEN", self._keys.claims),
            ("XRANGE", self._keys.tickets, "-", "+", "COUNT", 1),
            ("XRANGE", self._keys.rollout_tickets, "-", "+", "COUNT", 1),
            ("ZCARD", self._keys.replay_order),
            ("XLEN", self._keys.deadletter),
            ("TIME",),
        )
        issued_ms = [int(entry.partition(b"-")[0]) for entry, _ in queued]
        issued_ms += [int(fields[5]) for _, fields in rollouts if len(fields) > 5]  # an older version wrote no time
        now_ms = 1e3 * int(seconds) + int(micros) / 1e3
        return Sizes(claimed, max(0.0, now_ms - min(issued_ms, default=now_ms)) / 1e3, groups, letters)

    async def server(self) -> Server:
        """Return the state of the server, or of several the fullest and the busiest."""
        said = await self._payloads.info_of_all("memory", "clients", "persistence")
        clients = max(int(info["connected_clients"]) for info in said)
        return Server(*fullest(said), clients, all(info.get("aof_last_write_status", "ok") == "ok" for info in said))

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[TopicSubscription]:
        """Yield a subscription to topics (`TOPICS`), without any yet."""
        async with self._redis.client.pubsub() as channels:
            yield TopicSubscription(self._redis, channels)
