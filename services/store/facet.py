"""Base class of the store's facets."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from services.protocol.keys import Keys
from services.store.connection import Connection
from services.store.payloads import Payloads


class Facet:
    """Calls on one part of a run's state, over the connection that all parts of a store share."""

    def __init__(self, connection: Connection, payloads: Payloads) -> None:
        self._redis, self._payloads = connection, payloads

    @property
    def _keys(self) -> Keys:
        return self._redis.keys


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


def pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """Return the hash in a reply that lists names and values in turn."""
    return dict(zip(flat[::2], flat[1::2], strict=True))
