"""A run on a Redis Cluster: entirely on the master that owns the slot of its hash tag, to which every connection leads.

Guarantees: the owner is looked up on each connect; an answer from a node that does not own the slot, or must not serve it now,
ends the connection like a lost one, so the client's retries carry a run through failover and moved slots. While a slot moves, no
function runs on half of its keys: the key that functions are called with never exists, so the old owner redirects callers (ASK),
who wait for the new one.
"""

from __future__ import annotations

import random
from typing import Any, cast

from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import ConnectionError, RedisError, ResponseError, TimeoutError

Address = tuple[str, int]
ELSEWHERE = frozenset(["MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN", "READONLY", "NOREPLICAS"])
"""First words of errors that another node, or the same node a little later, would not return."""


class Elsewhere(ConnectionError):
    """A node reported that it does not serve the run now. Retried like a lost connection."""


class SlotOwner:
    """Finds the master that owns the slot of `key` by asking nodes of its Cluster; `settings` are those of connections of
    `kind`.
    """

    def __init__(self, kind: type[ToMaster], settings: dict[str, Any], key: str) -> None:
        self._kind, self._settings = kind, {**settings, "retry": Retry(NoBackoff(), 0)}
        self._slot = key_slot(key.encode())
        self._given: Address = (settings.get("host", "localhost"), int(settings.get("port", 6379)))
        self._nodes = {self._given}

    def of(self, key: str) -> SlotOwner:
        """Return the owner of another key's slot, looked up through the same nodes."""
        other = SlotOwner(self._kind, self._settings, key)
        other._nodes = set(self._nodes)
        return other

    async def find(self) -> Address:
        """Return the address of that master. Asks nodes in random order, so that a partitioned node misleads once, not always.

        Raises `ConnectionError` if no node knows, and the error of a node that rejects the query.
        """
        failures: list[RedisError] = []
        for node in random.sample(sorted(self._nodes), len(self._nodes)):
            try:
                ranges = await self._ranges(node)
            except (ConnectionError, TimeoutError) as error:
                failures.append(error)
                continue
            for first, last, (master, *_) in ranges:
                if first <= self._slot <= last and master:
                    return master
                if first <= self._slot <= last:
                    failures.append(
                        Elsewhere("its nodes are to be named by host but have no host names: set cluster-announce-hostname")
                    )
                    break
            else:
                failures.append(Elsewhere(f"{node[0]}:{node[1]} knows no master of slot {self._slot}"))
        raise failures[-1]

    async def replicas(self) -> list[Address]:
        """Return the addresses of its replicas, as it sees them itself; omits those without a name."""
        ranges = await self._ranges(await self.find())
        return [each for first, last, nodes in ranges if first <= self._slot <= last for each in nodes[1:] if each]

    async def _ranges(self, node: Address) -> list[tuple[int, int, list[Address | None]]]:
        """Return ranges of slots with their master and its replicas, as `node` sees them, and remember the nodes it names."""
        settings: dict[str, Any] = {**self._settings, "host": node[0], "port": node[1]}
        connection = self._kind(**settings)
        try:
            await connection.connect()
            await connection.send_command("CLUSTER", "SLOTS")
            ranges = cast("list[tuple[Any, ...]]", await connection.read_response())
        finally:
            await connection.disconnect(nowait=True)
        found = [(first, last, [_address(each, node) for each in nodes]) for first, last, *nodes in ranges]
        if found:  # a node that was reset knows no others
            self._nodes = {self._given, *(each for _, _, nodes in found for each in nodes if each)}
        return found


def _address(node: list[Any], asked: Address) -> Address | None:
    """Return the address in an entry of CLUSTER SLOTS; a node that does not know its own name has the one by which it was
    reached.

    None: it should have a name, but has none yet.
    """
    host = (node[0] or b"").decode()
    return None if host == "?" else (host or asked[0], int(node[1]))


class ToMaster(AbstractConnection):
    """A connection to a server that may stop being the master; after a reply that no master would give, it reconnects."""

    def __init__(self, *, owner: SlotOwner | None = None, **settings: Any) -> None:
        """`owner`: of the run's slot in a Cluster; by default, the server is not a node of one."""
        cast("Any", super()).__init__(**settings)
        self._owner = owner

    async def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        """Connect if not connected; the caller retries, because the owner may have changed."""
        if self._owner is not None and not self.is_connected:
            self.host, self.port = await self._owner.find()
        await super().connect_check_health(check_health, retry_socket_connect=False)

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """Read the next reply; raises `Elsewhere` for an error that the master would not return."""
        try:
            return await cast("Any", super()).read_response(*args, **options)
        except ResponseError as error:
            word = error.status_code or str(error).partition(" ")[0]
            if word not in ELSEWHERE:
                raise
            await self.disconnect(nowait=True)
            raise Elsewhere(f"{word} {str(error).removeprefix(word).lstrip()}") from None
