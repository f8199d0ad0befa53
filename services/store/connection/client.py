"""Redis clients and checks of their server: the only place where a client is created.

Guarantees: a server that cannot serve a run is detected within seconds, with one line that says why and how to fix it; every wait
has a limit.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from services.protocol.errors import RedisFull, RedisUnreachable, StoreError
from services.store.connection.fast_connection import FastConnection, redis_error
from services.store.connection.login import Address, Limits, Login, direct, shown
from services.store.connection.replies import ErrorReply

if TYPE_CHECKING:
    import redis.asyncio as aioredis
    from redis.exceptions import RedisError

    from services.store.connection.cluster import SlotOwner

__all__ = [
    "ClusterNode", "Login", "ask_nodes", "check_server", "explain", "facts", "in_cluster", "limits", "make_client", "redis_errors"
]  # fmt: skip

OLDEST_SERVER = (7, 0)  # the first Redis with Functions
CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 60.0  # longer than any stall seen during an AOF rewrite
PROBE_TIMEOUT_S = 2.0  # for each attempt to reach a server that may not exist; two attempts to connect, two queries each
PROBE_RETRIES = 1
NO_RIGHT = ("has no permissions", "ACL failure", "user executing the script can't", "not allowed to access")
"""Replies of servers to a user without a permission; all but the first come from inside a function."""
RETRIES = 12  # back-off 0.05 s doubling to 1 s: about 9 s, a restart of a server


@dataclass(frozen=True)
class ClusterNode:
    """A node of a Cluster that holds part of a run."""

    role: Literal["master", "replica"]
    address: Address
    said: dict[str, Any] | StoreError
    """Its INFO, or why it did not answer."""
    shards: int = 0
    """Number of the run's shards on it, if it is a master."""

    def __str__(self) -> str:
        return f"{self.role} {self.address[0]}:{self.address[1]}"


def limits() -> Limits:
    """Return the limits of a run's connections."""
    return Limits(RETRIES, CONNECT_TIMEOUT_S, REPLY_TIMEOUT_S)


def make_client(url: str, login: Login, owner: SlotOwner | None = None) -> aioredis.Redis:
    """Create a client: binary replies, bounded waits, bounded retries. Raises `StoreError` for an invalid address.

    `owner`: the master in a Cluster to which all its connections lead (`check_server` returns it).
    """
    from services.store.connection.redis_py import create_client

    return create_client(url, login, owner, limits())


def in_cluster(info: Mapping[str, Any]) -> bool:
    """Return whether a server is a node of a Cluster, from its INFO; Redis and Valkey name the field differently."""
    return "cluster" in (info.get("redis_mode"), info.get("server_mode"))


async def check_server(url: str, login: Login, key: str) -> SlotOwner | None:
    """Raise `StoreError` if the server is unreachable, too old, or may evict a run's keys.

    For a node of a Cluster, this checks the master that owns the slot of `key`, and returns it.
    """
    try:
        info, owner = await _info(url, login), None
        if in_cluster(info):
            async with _probe(url, login) as probe:
                owner = _owner(url, probe, key)
            info = await _info(url, login, owner)
    except redis_errors() as error:
        raise explain(url, error) from None
    version = str(info.get("valkey_version") or info.get("redis_version") or "0")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SERVER:
        raise StoreError(f"Redis at {shown(url)} is {version}, which has no Functions: run Redis 7.0 or newer, or Valkey")
    if (policy := info.get("maxmemory_policy", "noeviction")) != "noeviction":
        raise StoreError(
            f"Redis at {shown(url)} has maxmemory-policy {policy}, which may delete a run's state: set it to noeviction"
        )
    return owner


async def ask_nodes(url: str, login: Login, key: str, shards: Sequence[str] = ()) -> list[ClusterNode]:
    """Return the nodes of a Cluster that hold a run: the master that owns the slot of `key` first, then those of its `shards`, by
    keys, and all their replicas.

    Empty without a Cluster. Raises `StoreError` like `check_server`.
    """
    if not (owner := await check_server(url, login, key)):
        return []
    held, replicas = Counter[Address](), set[Address]()
    try:
        main = await owner.find()
        held[main] = 0
        replicas.update(await owner.replicas())
        for shard in map(owner.of, shards):
            held[await shard.find()] += 1
            replicas.update(await shard.replicas())
    except redis_errors() as error:
        raise explain(url, error) from None
    masters = [ClusterNode("master", address, await _said(url, login, address), count) for address, count in held.items()]
    return masters + [ClusterNode("replica", address, await _said(url, login, address)) for address in sorted(replicas)]


async def _said(url: str, login: Login, node: Address) -> dict[str, Any] | StoreError:
    try:
        async with _probe(url, login, node=node) as probe:
            return await cast("Any", probe).info()
    except redis_errors() as error:
        return explain(f"{url.partition('://')[0]}://{node[0]}:{node[1]}", error)


@asynccontextmanager
async def _probe(
    url: str, login: Login, owner: SlotOwner | None = None, node: Address | None = None
) -> AsyncGenerator[aioredis.Redis]:
    """Open a client to the server at `url`, or to the `owner` or this `node` of its Cluster."""
    from services.store.connection.redis_py import create_client

    probe = create_client(url, login, owner, _probing())
    if node:
        probe.connection_pool.connection_kwargs.update(host=node[0], port=node[1])
    try:
        yield probe
    finally:
        await closed(probe)


async def closed(client: aioredis.Redis) -> None:
    """Close a client's connections, even if the caller is cancelled: others would stay open until garbage collection."""
    await asyncio.shield(asyncio.ensure_future(client.aclose()))


def _probing() -> Limits:
    return Limits(PROBE_RETRIES, PROBE_TIMEOUT_S, PROBE_TIMEOUT_S)


async def _info(url: str, login: Login, owner: SlotOwner | None = None) -> Mapping[str, Any]:
    """Return INFO, one section per call: a server that is too old rejects two, and its age must be reported."""
    settings = direct(url, login, _probing())
    if settings is None:
        async with _probe(url, login, owner) as probe:
            return await cast("Any", probe).info("server") | await cast("Any", probe).info("memory")
    with closing(FastConnection({**settings, "owner": owner})) as fast:
        replies = await fast.ask([("INFO", "server"), ("INFO", "memory")])
    for reply in replies:
        if isinstance(reply, ErrorReply):
            raise redis_error(reply)
    return facts(b"\r\n".join(replies))


def facts(info: bytes) -> dict[str, str]:
    """Return the fields of a reply to INFO."""
    lines = info.decode().splitlines()
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


def _owner(url: str, probe: aioredis.Redis, key: str) -> SlotOwner:
    import redis.asyncio as aioredis

    from services.store.connection.cluster import SlotOwner

    pool: Any = probe.connection_pool
    if not issubclass(pool.connection_class, aioredis.Connection):
        raise StoreError(
            f"Redis at {shown(url)} is a node of a Redis Cluster, whose other nodes cannot be reached through a socket file: "
            "set redis.url to redis://host:port/0 of one of them"
        )
    return SlotOwner(pool.connection_class, dict(pool.connection_kwargs), key)


def redis_errors() -> type[RedisError]:
    """Return redis-py's errors, for an `except` that imports them only when something is raised."""
    from redis.exceptions import RedisError

    return RedisError


def explain(url: str, error: RedisError) -> StoreError:
    """Return a one-line explanation of why a server cannot be used."""
    from redis.exceptions import AuthenticationError, ConnectionError, NoPermissionError, OutOfMemoryError, TimeoutError

    from services.store.connection.exceptions import Elsewhere

    url = shown(url)
    if isinstance(error, AuthenticationError) or "NOAUTH" in str(error) or "WRONGPASS" in str(error):
        return StoreError(f"Redis at {url} rejected the password: set redis.password_file or GRPO_REDIS_PASSWORD")
    if isinstance(error, NoPermissionError) or any(words in str(error) for words in NO_RIGHT):
        return StoreError(f"Redis at {url} denies this user permission ({error}): give it the rights that `grpo acl` prints")
    if isinstance(error, OutOfMemoryError):
        return RedisFull(
            f"Redis at {url} is full: raise its maxmemory, or lower admission.prompts_per_step or checkpoint.every_steps"
        )
    if "unknown command" in str(error):
        return StoreError(f"Redis at {url} answers {str(error)!r}: run Redis 7.0 or newer, or Valkey")
    if "SELECT" in str(error) or "DB index" in str(error):
        return StoreError(f"Redis at {url} has no such database ({error}): end redis.url in /0, the only one of a Redis Cluster")
    if isinstance(error, Elsewhere):
        return RedisUnreachable(
            f"Redis at {url} is not serving the run yet ({error}): check that it is a master with its required replicas, "
            "and in a Redis Cluster run `redis-cli --cluster check`"
        )
    if isinstance(error, ConnectionError | TimeoutError):
        return RedisUnreachable(
            f"Redis at {url} cannot be reached ({error}): check that it is running and that redis.url is right"
        )
    return StoreError(f"Redis at {url} cannot be used: {error}")
