"""What operators monitor: step metrics, sizes, the server, notifications."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from services.protocol.keys import Keys
from services.store.calls.facet import Facet
from services.store.calls.run import fullest
from services.store.connection.base import Connection
from services.store.connection.commands import Subscription

METRICS_KEPT = 100_000  # entries of the metrics stream, some 50 MB


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
    persists: bool  # whether the last write to its append-only file succeeded, or it keeps none; true only if true of all servers


class TopicSubscription:
    """Topics as they change. A hint, never the state itself."""

    def __init__(self, redis: Connection, keys: Keys, channels: Subscription) -> None:
        self._redis, self._keys, self._channels = redis, keys, channels

    async def add(self, *topics: str) -> None:
        """Subscribe to topics, at least one. May be called while another task waits for the next notification."""
        await self._redis.ask(self._channels.subscribe(*map(self._keys.notifications, topics)))

    async def __aiter__(self) -> AsyncIterator[str]:
        """Yield the topics that were added, each whenever it changes."""
        while True:
            if message := await self._redis.ask(self._channels.get_message(timeout=1.0)):
                yield message["data"].decode()


class Monitor(Facet):
    """Reads for monitoring, and `record`."""

    async def record(self, metrics: dict[str, float]) -> None:
        """Append the metrics of a step to the capped stream."""
        await self._redis.call("record", msgspec.json.encode(metrics), METRICS_KEPT)

    async def metrics(self, after: str = "-", count: int = 1000) -> list[tuple[str, dict[str, float]]]:
        """Return entries of the metrics stream after an entry id, oldest first."""
        first = after if after == "-" else f"({after}"
        entries = await self._redis.ask(self._redis.commands.xrange(self._keys.metrics, first, "+", count))
        return [(entry.decode(), msgspec.json.decode(fields[b"m"])) for entry, fields in entries]

    async def last_recorded_step(self) -> int:
        """Return the last step in the metrics stream; -1: none."""
        return int((await self.last_record()).get("step", -1))

    async def last_record(self) -> dict[str, float]:
        """Return the last entry of the metrics stream; {}: there is none."""
        entries = await self._redis.ask(self._redis.commands.xrevrange(self._keys.metrics, count=1))
        return msgspec.json.decode(entries[0][1][b"m"]) if entries else {}

    async def sizes(self) -> Sizes:
        """Return sizes of the run, each read by a short command."""
        claimed, first, groups, letters, (seconds, micros) = await self._redis.send(
            ("HLEN", self._keys.claims), ("XRANGE", self._keys.tickets, "-", "+", "COUNT", 1), ("ZCARD", self._keys.replay_order),
            ("XLEN", self._keys.deadletter), ("TIME",),
        )  # fmt: skip
        issued_s = int(first[0][0].decode().partition("-")[0]) / 1e3 if first else 0.0
        age_s = max(0.0, int(seconds) + int(micros) / 1e6 - issued_s) if first else 0.0
        return Sizes(claimed, age_s, groups, letters)

    async def server(self, limit: int = 0) -> Server:
        """Return the state of the server, or of several the fullest and the busiest. `limit`: bytes that each may use, 0: its own
        limit.
        """
        said = await self._payloads.info_of_all("memory", "clients", "persistence")
        clients = max(int(info["connected_clients"]) for info in said)
        return Server(*fullest(said, limit), clients, all(info.get("aof_last_write_status", "ok") == "ok" for info in said))

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[TopicSubscription]:
        """Yield a subscription to topics (`TOPICS`), without any yet."""
        async with self._redis.subscription() as channels:
            yield TopicSubscription(self._redis, self._keys, channels)
