"""Base class of the store's facets."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence

import msgspec

from services.store.connection import Connection
from services.store.payloads import Payloads

TOGETHER = 256
"""Entries of a stream, groups or plans in one request."""
Entry = tuple[bytes, dict[bytes, bytes]]
"""An entry of a stream: id and fields."""


class Facet:
    """Calls on one part of a run's state, over the connection that all parts of a store share."""

    def __init__(self, connection: Connection, payloads: Payloads) -> None:
        self._redis, self._payloads, self._keys = connection, payloads, connection.keys

    async def _pages(
        self, stream: str, first: str = "-", last: str = "+", newest_first: bool = False
    ) -> AsyncIterator[list[Entry]]:
        """Yield the entries of a stream from `first` to `last` in pages, oldest first by default."""
        read, bounds = self._redis.client.xrange, [first, last]
        if newest_first:
            read, bounds = self._redis.client.xrevrange, [last, first]
        while entries := await self._redis.ask(read(stream, *bounds, TOGETHER)):
            yield entries
            bounds[0] = f"({entries[-1][0].decode()}"

    async def _records(self, stream: str, after: str, count: int) -> list[tuple[str, dict[str, float]]]:
        """Return records of `metrics` or `evaluations` after an entry id, oldest first."""
        first = after if after == "-" else f"({after}"
        entries = await self._redis.ask(self._redis.client.xrange(stream, first, "+", count))
        return [(entry.decode(), msgspec.json.decode(fields[b"m"])) for entry, fields in entries]


_last_ordinal = 0


def ordinal() -> int:
    """Return a number greater than any that this process has drawn before, for calls of which only the last may count: one that
    arrives again, or after a later one, is ignored.
    """
    global _last_ordinal
    _last_ordinal = max(_last_ordinal + 1, time.monotonic_ns() // 1000)
    return _last_ordinal


def token() -> str:
    """Return a random name of a call that must take effect once, even if it arrives again after others."""
    return secrets.token_hex(8)


BOOT = token()
"""Names this process, where ordinals of several may meet."""


def named(flat: Sequence[bytes]) -> dict[str, bytes]:
    """Return the hash in a reply that lists names and values in turn."""
    return {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}
