"""Payloads of one run on several masters of a Redis Cluster: names the shards and assigns payloads to them. Pure.

Guarantees: shards are spread evenly over the slots. Masters that share the slots evenly have one shard each, or several, if there
are at least as many shards as masters. A name is in the same shard for every process.
"""

from __future__ import annotations

from binascii import crc32
from functools import cache

from services.protocol.keys import Keys

MOST = 64
"""Maximum number of shards of a run: a client has separate connections to each."""
OFF_CENTRE = 1 / 16  # share of its slots by which a shard may be off their centre; closer takes longer to find


@cache
def shards(run: str, count: int) -> tuple[Keys, ...]:
    """Return the keys of each shard: those of a run with a name that no real run can have."""
    from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot  # loads all of redis-py, which a configuration can do without

    share, found, number = REDIS_CLUSTER_HASH_SLOTS / count, dict[int, Keys](), 0
    while len(found) < count:
        keys = Keys(f"{run}/{number}")
        place, off = divmod(key_slot(keys.prefix.encode()) / share, 1)
        if abs(off - 0.5) <= OFF_CENTRE:
            found.setdefault(int(place), keys)
        number += 1
    return tuple(keys for _, keys in sorted(found.items()))


def shard_of(payload: str, count: int) -> int:
    """Return which of `count` shards holds a payload."""
    return crc32(payload.encode()) % count
