"""Redis clients and checks of their server: the only place where a client is created.

Guarantees: a server that cannot serve a run is detected within seconds, with one line that says why and how to fix it; every wait
has a limit.
"""

from __future__ import annotations

import asyncio
import re
import socket
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

from services.protocol.errors import RedisFull, RedisUnreachable, StoreError
from services.store.cluster import Address, Elsewhere, SlotOwner, ToMaster

OLDEST_SERVER = (7, 0)  # the first Redis with Functions
CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 60.0  # longer than any stall seen during an AOF rewrite
AGAIN_S = 15.0
"""How much longer than one reply a request may take with all its attempts: enough for an outage and a slow reply after it."""
PROBE_TIMEOUT_S = 2.0  # for each attempt to reach a server that may not exist; two attempts to connect, two queries each
PROBE_RETRIES = 1
RETRIES = 12  # about 9 s with the pauses below: a restart of a server
PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0  # between attempts, doubling
MOST_CONNECTIONS = 10_000  # of a client: one for each concurrent request; servers accept as many by default
VANISHED = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 3, socket.TCP_KEEPCNT: 3, socket.TCP_USER_TIMEOUT: 10_000}
"""TCP options for a host that vanishes silently: the connection is lost after 10 s with data in flight, after 20 s without. A
server that stalls is not affected, because its host acknowledges.
"""
NO_RIGHT = ("has no permissions", "ACL failure", "user executing the script can't", "not allowed to access")
"""Replies of servers to a user without a permission; all but the first come from inside a function."""


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


class _ByTCP(ToMaster, aioredis.Connection):
    """Connects by TCP."""


class _ByTLS(ToMaster, aioredis.SSLConnection):
    """Connects encrypted. Reloads the CA file on every connection, because it may have been renewed."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context.context = None
        return cast("Any", super())._connection_arguments()


class _BySocket(ToMaster, aioredis.UnixDomainSocketConnection):
    """Connects by a socket file."""


def make_client(url: str, login: Login, owner: SlotOwner | None = None, probe: bool = False) -> aioredis.Redis:
    """Create a client: binary replies, bounded waits, bounded retries. Raises `StoreError` for an invalid address.

    `owner`: the master in a Cluster to which all its connections lead (`check_server` returns it). `probe`: give up soon.
    """
    kind = {"rediss": _ByTLS, "unix": _BySocket}.get(url.partition(":")[0], _ByTCP)
    tls = {"ssl_ca_certs": login.ca_file} if login.ca_file and kind is _ByTLS else {}
    try:
        if tls:
            ssl.create_default_context(cafile=login.ca_file)
    except (OSError, ssl.SSLError) as error:
        path = f"redis.ca_file = {login.ca_file!r}"
        raise StoreError(f"cannot use {path}: {error}; name a file of certificates in PEM format") from None
    try:
        client: aioredis.Redis = cast("Any", aioredis.Redis).from_url(
            url,
            username=login.user or None,
            password=login.password or None,
            **tls,
            socket_connect_timeout=PROBE_TIMEOUT_S if probe else CONNECT_TIMEOUT_S,
            socket_timeout=PROBE_TIMEOUT_S if probe else REPLY_TIMEOUT_S,
            **({} if kind is _BySocket else {"socket_keepalive": True, "socket_keepalive_options": VANISHED}),
            protocol=2,  # hashes and scores come as lists of bytes
            retry=Retry(ExponentialBackoff(cap=LONGEST_PAUSE_S, base=PAUSE_S), PROBE_RETRIES if probe else RETRIES),
            retry_on_error=[ConnectionError, TimeoutError],
            max_connections=MOST_CONNECTIONS,
            driver_info=None,  # naming the client needs a permission that no service has
        )
    except ValueError as error:
        raise StoreError(f"redis.url = {shown(url)!r} is not a Redis address: {error}; use redis://host:port/0") from None
    client.connection_pool.connection_class = kind
    client.connection_pool.connection_kwargs["owner"] = owner
    return client


def request_limit_s() -> float:
    """Return how long a request may take with all its attempts."""
    return REPLY_TIMEOUT_S + AGAIN_S


async def closed(client: aioredis.Redis) -> None:
    """Close a client's connections, even if the caller is cancelled: others would stay open until garbage collection."""
    await asyncio.shield(asyncio.ensure_future(client.aclose()))


def shown(url: str) -> str:
    """Return the address without user and password, safe to log."""
    return re.sub(r"//.*@", "//", url)


def masked(text: str) -> str:
    """Return an address, or a text that ends with one, with `PASSWORD` in place of its password."""
    return re.sub(r"(://[^:/@]*):.+@", r"\1:PASSWORD@", text)


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
    except RedisError as error:
        raise explain(url, error) from None
    version = str(info.get("valkey_version") or info.get("redis_version") or "0")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SERVER:
        raise StoreError(f"Redis at {shown(url)} is {version}, which has no Functions: run Redis 7.0 or newer, or Valkey")
    if (policy := info.get("maxmemory_policy", "noeviction")) != "noeviction":
        raise StoreError(
            f"Redis at {shown(url)} has maxmemory-policy {policy}, which may delete a run's state: set it to noeviction"
        )
    return owner


async def _info(url: str, login: Login, owner: SlotOwner | None = None) -> Mapping[str, Any]:
    """Return INFO, one section per call: a server that is too old rejects two, and its age must be reported."""
    async with _probe(url, login, owner) as probe:
        return await cast("Any", probe).info("server") | await cast("Any", probe).info("memory")


def _owner(url: str, probe: aioredis.Redis, key: str) -> SlotOwner:
    pool: Any = probe.connection_pool
    if pool.connection_class is _BySocket:
        raise StoreError(
            f"Redis at {shown(url)} is a node of a Redis Cluster, whose other nodes cannot be reached through a socket file: "
            "set redis.url to redis://host:port/0 of one of them"
        )
    return SlotOwner(pool.connection_class, dict(pool.connection_kwargs), key)


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
            return await cast("Any", probe).info()
    except RedisError as error:
        return explain(f"{url.partition('://')[0]}://{node[0]}:{node[1]}", error)


@asynccontextmanager
async def _probe(
    url: str, login: Login, owner: SlotOwner | None = None, node: Address | None = None
) -> AsyncGenerator[aioredis.Redis]:
    """Open a client to the server at `url`, or to the `owner` or this `node` of its Cluster."""
    probe = make_client(url, login, owner, probe=True)
    if node:
        probe.connection_pool.connection_kwargs.update(host=node[0], port=node[1])
    try:
        yield probe
    finally:
        await closed(probe)


def facts(info: bytes) -> dict[str, str]:
    """Return the fields of a reply to INFO."""
    lines = info.decode().splitlines()
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


def explain(url: str, error: RedisError) -> StoreError:
    """Return a one-line explanation of why a server cannot be used."""
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
