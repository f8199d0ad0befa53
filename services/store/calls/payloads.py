"""Storage of payloads: with the index of their run, or in shards on several masters of a Redis Cluster (protocol/shards.py).

Guarantees for shards: the index holds an empty string under the name of a payload in a shard, which the functions treat like the
payload itself. It is written after the shard has acknowledged the payload, so no header names a payload that never arrived
(except in a restore, which nobody reads before its end). While there is a run, only `sweep` deletes from shards, and only
payloads that neither the index nor a claim named after they were seen in their shard. Payloads are named after claims, which are
unique, so nothing will name such a payload again, however late it is deleted. Each shard lists its payloads, and list and payload
change in one transaction, so a sweep finds everything.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence

from redis.crc import key_slot

from services.protocol.errors import StoreError
from services.protocol.keys import Keys
from services.protocol.shards import shard_of, shards
from services.store.connection.base import Connection
from services.store.connection.client import check_server, shown

FIELD = "payload_shards"
"""Field of the run's hash: its number of shards. Missing without shards."""
ELSEWHERE = b""
"""Value in the index that stands for a payload in a shard."""
FETCHED_TOGETHER = 16  # payloads in one command
NAMED_TOGETHER = 512  # names in one command
ANSWER_S = 2.0  # a shard's server that does not answer INFO for this long counts as unavailable


class Payloads:
    """Stores and reads payloads, in sealed form."""

    shards: Sequence[Connection] = ()
    """The shards that this process knows; empty: payloads are with the index."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection

    @property
    def _keys(self) -> Keys:
        return self._redis.keys

    async def close(self) -> None:
        """Close the connections to the shards."""
        await self.spread(0)

    async def check_shards(self, count: int) -> None:
        """Raise `StoreError` unless payloads can be stored in `count` shards: their masters must be fit for a run."""
        names = shards(self._keys.name, count)
        if self._redis.owner is None:
            raise StoreError(
                f"redis.payload_shards = {count} needs a Redis Cluster, but Redis at {shown(self._redis.url)} is a single "
                "server: set it to 0, or redis.url to a node of a Cluster"
            )
        await asyncio.gather(*(check_server(self._redis.url, self._redis.login, keys.prefix) for keys in names))

    async def sweep(self) -> int:
        """Delete orphaned payloads from the shards. Returns how many.

        Any process may call it at any time, even late or after an interrupted sweep.
        """
        left = await self._left_over()
        await self._discard(left)
        return len(left)

    async def _left_over(self) -> list[str]:
        """Return the names of orphaned payloads in shards."""
        left: list[str] = []
        for page in _pages([name for found in await asyncio.gather(*map(self._strays, self.shards)) for name in found]):
            # A process that may still submit a payload holds its claim from before the payload was seen until its name is in the
            # index, so this order misses nothing. In one request, because one server answers it.
            claims, known = await self._redis.send(("HGETALL", self._keys.claims), ("MGET", *map(self._keys.payload, page)))
            fences = {claim.rpartition(b"|")[2].decode() for claim in claims[1::2]}
            left += [
                name for name, held in zip(page, known, strict=True) if held is None and name.rpartition(".")[2] not in fences
            ]
        return left

    async def _discard(self, names: Sequence[str]) -> None:
        await asyncio.gather(*(self._delete(shard, held) for shard, held in self._parted(names)))

    async def sealed(self, names: Sequence[str]) -> list[bytes | None]:
        """Return payloads by name; None for a missing one."""
        if not self.shards:
            found = await _get(self._redis, names)
            if ELSEWHERE not in found:
                return found
            if not await self.find_shards():
                raise StoreError(f"payloads of run {self._keys.name!r} are in shards, but the run does not say in how many")
        parted = list(self._parted(names))
        found = await asyncio.gather(*(_get(shard, held) for shard, held in parted))
        payloads = {
            name: sealed for (_, held), part in zip(parted, found, strict=True) for name, sealed in zip(held, part, strict=True)
        }
        return [payloads[name] for name in names]

    async def lay(self, payloads: Mapping[str, bytes]) -> None:
        """Write payloads to their shards."""

        async def write(shard: Connection, names: Sequence[str]) -> None:
            listed = ("ZADD", shard.keys.payloads, *(part for name in names for part in (0, name)))
            writes = [("SET", shard.keys.payload(name), payloads[name], "NX") for name in names]
            await shard.send(("MULTI",), listed, *writes, ("EXEC",))

        await asyncio.gather(*(write(shard, names) for shard, names in self._parted(payloads)))

    async def find_shards(self) -> int:
        """Read the number of shards."""
        await self.spread(int(await self._redis.ask(self._redis.commands.hget(self._keys.run, FIELD)) or 0))
        return len(self.shards)

    async def spread(self, count: int) -> None:
        """Set the number of shards. Clients connect when first needed."""
        if count == len(self.shards):
            return
        if count and self._redis.owner is None:
            raise StoreError(
                f"payloads of run {self._keys.name!r} are in a Redis Cluster, but Redis at {shown(self._redis.url)} is a single "
                "server"
            )
        names = shards(self._keys.name, count) if count else ()
        former, self.shards = self.shards, [self._shard(number, keys) for number, keys in enumerate(names)]
        for shard in former:
            await shard.close()

    def _shard(self, number: int, keys: Keys) -> Connection:
        assert self._redis.owner is not None
        owner, name = self._redis.owner.of(keys.prefix), f"(payload shard {number}, slot {key_slot(keys.prefix.encode())})"
        return Connection(keys, self._redis.url, self._redis.login, owner, name)

    async def delete_shards(self, count: int) -> None:
        """Delete every payload in the shards; in `count` shards for a deleted run, which no longer records their number."""
        if not await self.find_shards() and self._redis.owner is not None:
            await self.spread(count)
        await asyncio.gather(*map(self._empty, self.shards))

    async def info_of_all(self, *sections: str) -> list[dict[str, str]]:
        """Return INFO of the servers of the index and the shards. Omits shard servers that are unavailable, because most work
        needs none.
        """

        async def ask(shard: Connection) -> dict[str, str] | None:
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    return await shard.info(*sections)
            return None

        said = await asyncio.gather(self._redis.info(*sections), *map(ask, self.shards))
        return [info for info in said if info is not None]

    async def _empty(self, shard: Connection) -> None:
        async for names in _listed(shard):
            await self._delete(shard, names)

    async def _strays(self, shard: Connection) -> list[str]:
        """Return payloads that a shard holds and the index does not name."""
        strays: list[str] = []
        async for names in _listed(shard):
            (known,) = await self._redis.send(("MGET", *map(self._keys.payload, names)))
            strays += [name for name, held in zip(names, known, strict=True) if held is None]
        return strays

    async def _delete(self, shard: Connection, names: Sequence[str]) -> None:
        for page in _pages(names):
            unlinked = ("UNLINK", *map(shard.keys.payload, page))
            await shard.send(("MULTI",), unlinked, ("ZREM", shard.keys.payloads, *page), ("EXEC",))

    def _parted(self, names: Iterable[str]) -> Iterable[tuple[Connection, list[str]]]:
        """Yield names grouped by their shard."""
        parts: defaultdict[int, list[str]] = defaultdict(list)
        for name in names:
            parts[shard_of(name, len(self.shards))].append(name)
        return ((self.shards[number], part) for number, part in parts.items())


async def _get(server: Connection, names: Sequence[str]) -> list[bytes | None]:
    keys = list(map(server.keys.payload, names))
    pieces = [keys[first : first + FETCHED_TOGETHER] for first in range(0, len(keys), FETCHED_TOGETHER)]
    return [sealed for found in await server.send(*[("MGET", *piece) for piece in pieces]) for sealed in found]


def _pages(names: Sequence[str]) -> Iterator[Sequence[str]]:
    return (names[first : first + NAMED_TOGETHER] for first in range(0, len(names), NAMED_TOGETHER))


async def _listed(shard: Connection) -> AsyncIterator[list[str]]:
    """Yield the payloads in a shard: all that stay there from the first page to the last."""
    after = "-"
    while found := (await shard.send(("ZRANGE", shard.keys.payloads, after, "+", "BYLEX", "LIMIT", 0, NAMED_TOGETHER)))[0]:
        yield [name.decode() for name in found]
        after = f"({found[-1].decode()}"
