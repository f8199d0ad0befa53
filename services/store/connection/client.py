"""Redis clients and the state of the server behind them: the only place where a client is made.

Guarantees: a server that cannot serve a run is found out in seconds, with one line that says why and how to mend it;
no wait is without a limit.
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

from services.protocol.errors import StoreError
from services.store.connection.cluster import Address, Elsewhere, SlotOwner, ToOwner, in_cluster
from services.store.connection.commands import typed
from services.store.connection.fast_connection import VANISHED

OLDEST_SERVER = (7, 0)  # the first Redis with Functions
CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 60.0  # longer than an AOF rewrite was ever seen to stall a reply
PROBE_TIMEOUT_S = 2.0  # of each try to reach a server that may not be one; two to connect, for each of two to ask
PROBE_RETRIES = 1
NO_RIGHT = ("has no permissions", "user executing the script can't", "not allowed to access")  # of a user, inside a function
RETRIES = 12  # back-off 0.05 s doubling to 1 s: about 9 s, a restart of a server


@dataclass(frozen=True)
class Login:
    """How a client proves itself, and how it knows the server."""

    password: str = field(default="", repr=False)
    user: str = ""
    """Empty: the one that the address names, or the server's default user."""
    ca_file: str = ""
    """For `rediss://`: certificates of who may have signed the server's; empty: those that the system trusts."""


@dataclass(frozen=True)
class ClusterNode:
    """A node of a Cluster that holds something of a run."""

    role: Literal["master", "replica"]
    address: Address
    said: dict[str, Any] | StoreError
    """Of itself (INFO), or why it does not."""
    shards: int = 0
    """Of the run, on a master."""

    def __str__(self) -> str:
        return f"{self.role} {self.address[0]}:{self.address[1]}"


class _Trusting(aioredis.SSLConnection):
    """Reads whom it trusts whenever it connects: the file may have been renewed since the last time."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context.context = None
        return cast("Any", super())._connection_arguments()


class _ToOwnerByTLS(ToOwner, _Trusting):
    """To the owner in a Cluster, encrypted."""


def make_client(url: str, login: Login, owner: SlotOwner | None = None) -> aioredis.Redis:
    """A client: binary replies, bounded waits, bounded retries. Raises `StoreError` for an address that is none.

    `owner`: the master in a Cluster to which all its connections are to lead (`check_server` knows).
    """
    return _client(url, login, owner, RETRIES, CONNECT_TIMEOUT_S, REPLY_TIMEOUT_S)


def plain_client(client: aioredis.Redis) -> aioredis.Redis:
    """The same connections for replies as they were sent: lists and bytes, no dictionaries and pairs. Of `rediss` and `unix`."""
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
        raise StoreError(f"redis.ca_file = {path!r} cannot be used: {error}; name a file of certificates in PEM") from None


async def check_server(url: str, login: Login, key: str) -> SlotOwner | None:
    """Raises `StoreError` when the server cannot be reached, is too old, or may evict a run's keys.

    Where it is a node of a Cluster this is of the master that owns the slot of `key`, which is returned.
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
    """The nodes of a Cluster on which a run is: the master that owns the slot of `key` first, those of its `shards`, by keys, and
    all their replicas.

    Empty without a Cluster. Raises `StoreError` as `check_server`.
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
    """To the server at `url`; else to the `owner`, or to this `node` of its Cluster."""
    probe = _client(url, login, owner, PROBE_RETRIES, PROBE_TIMEOUT_S, PROBE_TIMEOUT_S)
    if node:
        probe.connection_pool.connection_kwargs.update(host=node[0], port=node[1])
    try:
        yield probe
    finally:
        await probe.aclose()


async def _info(probe: aioredis.Redis) -> dict[str, Any]:
    """One section a call: a server that is too old takes no two, and is to be told that it is too old."""
    return await typed(probe).info("server") | await typed(probe).info("memory")


def _owner(shown: str, probe: aioredis.Redis, key: str) -> SlotOwner:
    pool: Any = probe.connection_pool
    if not issubclass(pool.connection_class, aioredis.Connection):
        raise StoreError(
            f"Redis at {shown} is a node of a Redis Cluster, whose others no socket file reaches: "
            "set redis.url to redis://host:port/0 of one of them"
        )
    return SlotOwner(pool.connection_class, dict(pool.connection_kwargs), key)


def explain(url: str, error: RedisError) -> StoreError:
    """A one-line account of why a server cannot be used."""
    url = _shown(url)
    if isinstance(error, AuthenticationError) or "NOAUTH" in str(error) or "WRONGPASS" in str(error):
        return StoreError(f"Redis at {url} refused the password: set redis.password_file or GRPO_REDIS_PASSWORD")
    if isinstance(error, NoPermissionError) or any(words in str(error) for words in NO_RIGHT):
        return StoreError(f"Redis at {url} does not allow that to this user ({error}): give it the rights that `grpo acl` prints")
    if isinstance(error, OutOfMemoryError):
        return StoreError(
            f"Redis at {url} is full: raise its maxmemory, or lower admission.prompts_per_step or checkpoint.every_steps"
        )
    if "unknown command" in str(error):
        return StoreError(f"Redis at {url} answers {str(error)!r}: run Redis 7.0 or newer, or Valkey")
    if "SELECT" in str(error) or "DB index" in str(error):
        return StoreError(f"Redis at {url} has no such database ({error}): end redis.url in /0, the only one of a Redis Cluster")
    if isinstance(error, Elsewhere):
        return StoreError(
            f"Redis at {url} did not come to serve the run ({error}): see that it is a master with the replicas that it wants, "
            "and in a Redis Cluster what `redis-cli --cluster check` says"
        )
    if isinstance(error, ConnectionError | TimeoutError):
        return StoreError(f"Redis at {url} cannot be reached ({error}): is it running, and is redis.url right?")
    return StoreError(f"Redis at {url} cannot be used: {error}")


def _shown(url: str) -> str:
    """The address without user and password, fit for a log."""
    return re.sub(r"//[^@/]*@", "//", url)
