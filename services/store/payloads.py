"""Storage of payloads: with the index of their run or, on a Redis Cluster, spread over its masters in shards.

Everything of a run except its payloads is its *index*, on the master that owns its slot. A shard is a separate hash tag,
`{RUN/n}`, reached like the index. The index holds the *place* of a payload in the key that would hold the payload itself without
a Cluster: its name or, after a restore, `<name>~<fence of the trainer>`. The functions do not look into that key, so they need
not know about shards.

Guarantees for shards: they are spread evenly over the slots. A place is written to the index after the shard has acknowledged the
payload, so no header names a payload that never arrived (except in a restore, which nobody reads before its end). While there is
a run, only `sweep` deletes from shards, and only payloads that neither the index nor a claim named after they were seen in their
shard. Claims and fences of trainers are unique, so nothing will name such a place again, however late it is deleted. Each shard
lists its payloads, and list and payload change in one transaction, so a sweep finds everything.
"""

from __future__ import annotations

import asyncio
import contextlib
from binascii import crc32
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from services.protocol import codec
from services.protocol.codec import CorruptMessage
from services.protocol.errors import StoreError
from services.protocol.keys import Keys
from services.protocol.payloads import Payload
from services.store.batching import pieces
from services.store.client import check_server
from services.store.connection import Connection

SHARDS = 12
"""Number of shards of a run on a Cluster. 2, 3, 4, 6 or 12 masters that share the slots evenly have equally many of them."""
OFF_CENTRE = 1 / 16  # share of its slots by which a shard may be off their centre; closer takes longer to find
FETCHED_TOGETHER = 16  # payloads in one command
NAMED_TOGETHER = 512  # names in one command
GONE = (
    "it is gone from Redis: check for an eviction policy, another client that deletes keys, or a server that lost its last writes"
)
ANSWER_S = 2.0  # a shard's server that does not answer INFO for this long counts as unavailable


@cache
def shard_keys(run: str) -> tuple[Keys, ...]:
    """Return the keys of each shard: those of a run with a name that no real run can have."""
    share, found, number = REDIS_CLUSTER_HASH_SLOTS / SHARDS, dict[int, Keys](), 0
    while len(found) < SHARDS:
        keys = Keys(f"{run}/{number}")
        place, off = divmod(key_slot(keys.prefix.encode()) / share, 1)
        if abs(off - 0.5) <= OFF_CENTRE:
            found.setdefault(int(place), keys)
        number += 1
    return tuple(keys for _, keys in sorted(found.items()))


def restored_place(payload: str, fence: int) -> str:
    """Return the place of a payload that a trainer with this fence restores."""
    return f"{payload}~{fence}"


def _shard_of(place: str) -> int:
    return crc32(place.encode()) % SHARDS


def _named(place: str) -> str:
    """Return the payload that has this place."""
    return place.partition("~")[0]


class Payloads:
    """Stores and reads payloads, in sealed form."""

    def __init__(self, connection: Connection) -> None:
        self._redis, self._keys = connection, connection.keys
        self.shards: list[Connection] = []
        """Empty without a Cluster: payloads are with the index."""
        if owner := connection.owner:
            for number, keys in enumerate(shard_keys(self._keys.name)):
                name = f"(payload shard {number}, slot {key_slot(keys.prefix.encode())})"
                self.shards.append(Connection(keys, connection.url, connection.login, owner.of(keys.prefix), name))

    async def close(self) -> None:
        """Close the connections to the shards."""
        for shard in self.shards:
            await shard.close()

    async def check(self) -> None:
        """Raise `StoreError` unless the masters of all shards are fit for a run."""
        await asyncio.gather(*(check_server(shard.url, shard.login, shard.keys.prefix) for shard in self.shards))

    async def sealed(self, names: Sequence[str]) -> list[bytes | None]:
        """Return payloads by name; None for a missing one."""
        found = await _get(self._redis, names)
        if not self.shards:
            return found
        places = [None if place is None else place.decode() for place in found]
        parted = list(self._parted(filter(None, places)))
        parts = await asyncio.gather(*(_get(shard, held) for shard, held in parted))
        payloads = {
            place: sealed for (_, held), part in zip(parted, parts, strict=True) for place, sealed in zip(held, part, strict=True)
        }
        return [payloads[place] if place else None for place in places]

    async def read(self, names: Sequence[str]) -> dict[str, Payload | CorruptMessage]:
        """Return payloads by name, or what is wrong with them."""
        found = dict[str, Payload | CorruptMessage]()
        for name, sealed in zip(names, await self.sealed(names), strict=True):
            try:
                found[name] = codec.decode(codec.unseal(sealed), Payload) if sealed is not None else CorruptMessage(GONE)
            except CorruptMessage as error:
                found[name] = error
        return found

    async def lay(self, payloads: Mapping[str, bytes]) -> None:
        """Write payloads, by place, to their shards."""

        async def write(shard: Connection, places: Sequence[str]) -> None:
            listed = ("ZADD", shard.keys.payloads, *(part for place in places for part in (0, place)))
            writes = [("SET", shard.keys.payload(place), payloads[place], "NX") for place in places]
            await shard.send(("MULTI",), listed, *writes, ("EXEC",))

        await asyncio.gather(*(write(shard, places) for shard, places in self._parted(payloads)))

    async def sweep(self) -> int:
        """Delete orphaned payloads from the shards. Returns how many.

        Any process may call it at any time, even late or after an interrupted sweep.
        """
        left = await self.orphans()
        await self.discard(left)
        return len(left)

    async def orphans(self) -> list[str]:
        """Return the places of orphaned payloads in shards."""
        left: list[str] = []
        strays = [place for found in await asyncio.gather(*map(self._strays, self.shards)) for place in found]
        for page in pieces(strays, NAMED_TOGETHER):
            # A process that may still submit a payload holds its claim from before the payload was seen until its place is in the
            # index, so this order misses nothing. In one request, because one server answers it.
            claims, known = await self._redis.send(("HGETALL", self._keys.claims), self._held_at(page))
            fences = {claim.rpartition(b"|")[2].decode() for claim in claims[1::2]}
            left += [place for place in _unknown(page, known) if place.rpartition(".")[2] not in fences]
        return left

    async def discard(self, places: Sequence[str]) -> None:
        """Delete payloads in shards."""
        await asyncio.gather(*(self._delete(shard, held) for shard, held in self._parted(places)))

    async def delete_all(self) -> None:
        """Delete every payload in the shards."""

        async def empty(shard: Connection) -> None:
            async for places in _listed(shard):
                await self._delete(shard, places)

        await asyncio.gather(*map(empty, self.shards))

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

    async def _strays(self, shard: Connection) -> list[str]:
        """Return payloads that a shard holds and the index does not name."""
        strays: list[str] = []
        async for places in _listed(shard):
            strays += _unknown(places, (await self._redis.send(self._held_at(places)))[0])
        return strays

    def _held_at(self, places: Sequence[str]) -> tuple[Any, ...]:
        """Return the command that reads where the index has these payloads."""
        return ("MGET", *(self._keys.payload(_named(place)) for place in places))

    async def _delete(self, shard: Connection, places: Sequence[str]) -> None:
        for page in pieces(places, NAMED_TOGETHER):
            unlinked = ("UNLINK", *map(shard.keys.payload, page))
            await shard.send(("MULTI",), unlinked, ("ZREM", shard.keys.payloads, *page), ("EXEC",))

    def _parted(self, places: Iterable[str]) -> Iterable[tuple[Connection, list[str]]]:
        """Yield places grouped by their shard."""
        parts: defaultdict[int, list[str]] = defaultdict(list)
        for place in places:
            parts[_shard_of(place)].append(place)
        return ((self.shards[number], part) for number, part in parts.items())


def _unknown(places: Sequence[str], held: Sequence[bytes | None]) -> list[str]:
    """Return the places that the index does not name, given what it holds under the names of these payloads."""
    return [place for place, there in zip(places, held, strict=True) if there != place.encode()]


async def _get(server: Connection, names: Sequence[str]) -> list[bytes | None]:
    reads = [("MGET", *piece) for piece in pieces(list(map(server.keys.payload, names)), FETCHED_TOGETHER)]
    return [sealed for found in await server.send(*reads) for sealed in found]


async def _listed(shard: Connection) -> AsyncIterator[list[str]]:
    """Yield the payloads in a shard: all that stay there from the first page to the last."""
    after = "-"
    while found := (await shard.send(("ZRANGE", shard.keys.payloads, after, "+", "BYLEX", "LIMIT", 0, NAMED_TOGETHER)))[0]:
        yield [name.decode() for name in found]
        after = f"({found[-1].decode()}"
