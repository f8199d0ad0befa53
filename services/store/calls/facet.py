"""Base class of the store's facets."""

from __future__ import annotations

from services.protocol.keys import Keys
from services.store.calls.payloads import Payloads
from services.store.connection.base import Connection


class Facet:
    """Calls on one part of a run's state, over the connection that all parts of a store share."""

    def __init__(self, connection: Connection, payloads: Payloads) -> None:
        self._redis, self._payloads = connection, payloads

    @property
    def _keys(self) -> Keys:
        return self._redis.keys
