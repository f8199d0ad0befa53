"""Redis clients and checks of their server: the only place where a client is created.

Guarantees: a server that cannot serve a run is detected within seconds, with one line that says why and how to fix it; every wait
has a limit.
"""

from __future__ import annotations

import re
import ssl
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import AuthenticationError, ConnectionError, NoPermissionError, OutOfMemoryError, RedisError, TimeoutError

from services.protocol.errors import RedisUnreachable, StoreError
from services.store.connection.cluster import Address, Elsewhere, SlotOwner, ToOwner, in_cluster
from services.store.connection.commands import typed
from services.store.connection.fast_connection import VANISHED

OLDEST_SERVER = (7, 0)  # the first Redis with Functions
CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 60.0  # longer than any stall seen during an AOF rewrite
PROBE_TIMEOUT_S = 2.0  # for each attempt to reach a server that may not exist; two attempts to connect, two queries each
PROBE_RETRIES = 1
NO_RIGHT = ("has no permissions", "ACL failure", "user executing the script can't", "not allowed to access")
"""What servers answer a user without a permission; all but the first inside a function."""
RETRIES = 12  # back-off 0.05 s doubling to 1 s: about 9 s, a restart of a server


@dataclass(frozen=True)
class Login:
    """A client's credentials, and how it verifies the server."""

    password: str = field(default="", repr=False)
    user: str = ""
    """User name; empty: the one in the address, or the server's default user."""
    ca_file: str = ""
    """CA bundle used to verify the server certificate of `rediss://`; empty: the system's."""


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


class _Trusting(aioredis.SSLConnection):
    """Reloads the CA file on every connection, because it may have been renewed."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context.context = None
        return cast("Any", super())._connection_arguments()


class _ToOwnerByTLS(ToOwner, _Trusting):
    """Connects to the slot owner in a Cluster, encrypted."""


def make_client(url: str, login: Login, owner: SlotOwner | None = None) -> aioredis.Redis:
    """Create a client: binary replies, bounded waits, bounded retries. Raises `StoreError` for an invalid address.

    `owner`: the master in a Cluster to which all its connections lead (`check_server` returns it).
    """
    return _client(url, login, owner, RETRIES, CONNECT_TIMEOUT_S, REPLY_TIMEOUT_S)


def plain_client(client: aioredis.Redis) -> aioredis.Redis:
    """Return a client that shares the connections and returns replies as sent: lists and bytes, no dictionaries and pairs. For
    `rediss` and `unix`.
    """
    plain = aioredis.Redis(connection_pool=client.connection_pool)
    plain.response_callbacks.clear()
    return plain


def _client(
    url: str, login: Login, owner: SlotOwner | None, retries: int, connect_timeout_s: float, reply_timeout_s: float
) -> aioredis.Redis:
    who = {"username": login.user} if login.user else {}
    tls = {"ssl_ca_certs": login.ca_file} if login.ca_file and url.startswith("rediss:") else {}
    if tls:
        _check_certificates(login.ca_file)
    try:
        client: aioredis.Redis = cast("Any", aioredis.Redis).from_url(
            url,
            password=login.password or None,
            **who,
            **tls,
            socket_connect_timeout=connect_timeout_s,
            socket_timeout=reply_timeout_s,
            **({} if url.startswith("unix:") else {"socket_keepalive": True, "socket_keepalive_options": VANISHED}),
            protocol=2 if url.startswith(("unix:", "rediss:")) else None,  # 2: replies are lists (`plain_client`)
            health_check_interval=15,
            retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), retries),
            retry_on_error=[ConnectionError, TimeoutError],
        )
    except ValueError as error:
        raise StoreError(f"redis.url = {_shown(url)!r} is not a Redis address: {error}; use redis://host:port/0") from None
    pool = client.connection_pool
    if tls:
        pool.connection_class = _Trusting
    if owner:
        pool.connection_class = _ToOwnerByTLS if url.startswith("rediss:") else ToOwner
        pool.connection_kwargs["owner"] = owner
    return client


def _check_certificates(path: str) -> None:
    try:
        ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise StoreError(f"cannot use redis.ca_file = {path!r}: {error}; name a file of certificates in PEM format") from None


async def check_server(url: str, login: Login, key: str) -> SlotOwner | None:
    """Raise `StoreError` if the server is unreachable, too old, or may evict a run's keys.

    For a node of a Cluster, this checks the master that owns the slot of `key`, and returns it.
    """
    shown = _shown(url)
    try:
        async with _probe(url, login) as probe:
            info = await _info(probe)
            owner = _owner(shown, probe, key) if in_cluster(info) else None
        if owner:
            async with _probe(url, login, owner) as probe:
                info = await _info(probe)
    except RedisError as error:
        raise explain(url, error) from None
    version = str(info.get("valkey_version") or info.get("redis_version") or "0")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SERVER:
        raise StoreError(f"Redis at {shown} is {version}, which has no Functions: run Redis 7.0 or newer, or Valkey")
    if (policy := info.get("maxmemory_policy", "noeviction")) != "noeviction":
        raise StoreError(f"Redis at {shown} has maxmemory-policy {policy}, which may delete a run's state: set it to noeviction")
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
    except RedisError as error:
        raise explain(url, error) from None
    masters = [ClusterNode("master", address, await _said(url, login, address), count) for address, count in held.items()]
    return masters + [ClusterNode("replica", address, await _said(url, login, address)) for address in sorted(replicas)]


async def _said(url: str, login: Login, node: Address) -> dict[str, Any] | StoreError:
    try:
        async with _probe(url, login, node=node) as probe:
            return await typed(probe).info()
    except RedisError as error:
        return explain(f"{url.partition('://')[0]}://{node[0]}:{node[1]}", error)


@asynccontextmanager
async def _probe(
    url: str, login: Login, owner: SlotOwner | None = None, node: Address | None = None
) -> AsyncGenerator[aioredis.Redis]:
    """Open a client to the server at `url`, or to the `owner` or this `node` of its Cluster."""
    probe = _client(url, login, owner, PROBE_RETRIES, PROBE_TIMEOUT_S, PROBE_TIMEOUT_S)
    if node:
        probe.connection_pool.connection_kwargs.update(host=node[0], port=node[1])
    try:
        yield probe
    finally:
        await probe.aclose()


async def _info(probe: aioredis.Redis) -> dict[str, Any]:
    """Return INFO, one section per call: a server that is too old rejects two, and its age must be reported."""
    return await typed(probe).info("server") | await typed(probe).info("memory")


def _owner(shown: str, probe: aioredis.Redis, key: str) -> SlotOwner:
    pool: Any = probe.connection_pool
    if not issubclass(pool.connection_class, aioredis.Connection):
        raise StoreError(
            f"Redis at {shown} is a node of a Redis Cluster, whose other nodes cannot be reached through a socket file: "
            "set redis.url to redis://host:port/0 of one of them"
        )
    return SlotOwner(pool.connection_class, dict(pool.connection_kwargs), key)


def explain(url: str, error: RedisError) -> StoreError:
    """Return a one-line explanation of why a server cannot be used."""
    url = _shown(url)
    if isinstance(error, AuthenticationError) or "NOAUTH" in str(error) or "WRONGPASS" in str(error):
        return StoreError(f"Redis at {url} rejected the password: set redis.password_file or GRPO_REDIS_PASSWORD")
    if isinstance(error, NoPermissionError) or any(words in str(error) for words in NO_RIGHT):
        return StoreError(f"Redis at {url} denies this user permission ({error}): give it the rights that `grpo acl` prints")
    if isinstance(error, OutOfMemoryError):
        return StoreError(
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


def _shown(url: str) -> str:
    """Return the address without user and password, safe to log."""
    return re.sub(r"//[^@/]*@", "//", url)
