"""Payloads of one run on several masters of a Redis Cluster: the names of its shards, and which payload lies in which. Pure.

Guarantees: shards are spread evenly over the slots, so that masters which share those evenly have one each, or several, where
there are as many shards as masters; a name is in the same shard for every process.
"""

from __future__ import annotations

from binascii import crc32
from functools import cache

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from services.protocol.keys import Keys

MOST = 64
"""Shards of a run: a client has connections of its own to each."""
OFF_CENTRE = 1 / 16  # of its share of the slots: so far beside the middle of it a shard may lie; nearer takes longer to find


@cache
def shards(run: str, count: int) -> tuple[Keys, ...]:
    """Keys of each shard: those of a run that has a name which no run can have."""
    share, found, number = REDIS_CLUSTER_HASH_SLOTS / count, dict[int, Keys](), 0
    while len(found) < count:
        keys = Keys(f"{run}/{number}")
        place, off = divmod(key_slot(keys.prefix.encode()) / share, 1)
        if abs(off - 0.5) <= OFF_CENTRE:
            found.setdefault(int(place), keys)
        number += 1
    return tuple(keys for _, keys in sorted(found.items()))


def shard_of(payload: str, count: int) -> int:
    """Which of `count` shards a payload lies in."""
    return crc32(payload.encode()) % count
