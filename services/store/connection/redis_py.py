"""Clients of redis-py, for everything that the fast connection does not support: TLS, unix sockets, subscriptions, nodes of a
Cluster.

redis-py takes longer to import than most commands run, so the store imports this module when it first needs such a client.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, cast

import redis.asyncio as aioredis
from redis.exceptions import ConnectionError, TimeoutError

from services.protocol.errors import StoreError
from services.store.connection.cluster import SlotOwner, ToMaster, ToOwner
from services.store.connection.exceptions import retry_rule
from services.store.connection.login import VANISHED, Limits, Login, shown


class _ToMasterByTCP(ToMaster, aioredis.Connection):
    """Connects by TCP."""


class _ToMasterByTLS(ToMaster, aioredis.SSLConnection):
    """Connects encrypted. Reloads the CA file on every connection, because it may have been renewed."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context.context = None
        return cast("Any", super())._connection_arguments()


class _ToMasterBySocket(ToMaster, aioredis.UnixDomainSocketConnection):
    """Connects by a socket file."""


class _ToOwnerByTLS(ToOwner, _ToMasterByTLS):
    """Connects to the slot owner in a Cluster, encrypted."""


def plain_client(client: aioredis.Redis) -> aioredis.Redis:
    """Return a client that shares the connections and returns replies as sent: lists and bytes, not dictionaries and pairs. For
    `rediss` and `unix`.
    """
    plain = aioredis.Redis(connection_pool=client.connection_pool)
    plain.response_callbacks.clear()
    return plain


def create_client(url: str, login: Login, owner: SlotOwner | None, limits: Limits) -> aioredis.Redis:
    """Create a client: binary replies, bounded waits, bounded retries. Raises `StoreError` for an invalid address."""
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
            socket_connect_timeout=limits.connect_s,
            socket_timeout=limits.reply_s,
            **({} if url.startswith("unix:") else {"socket_keepalive": True, "socket_keepalive_options": VANISHED}),
            protocol=2 if url.startswith(("unix:", "rediss:")) else None,  # 2: replies are lists (`plain_client`)
            health_check_interval=15,
            retry=retry_rule(limits.retries),
            retry_on_error=[ConnectionError, TimeoutError],
        )
    except ValueError as error:
        raise StoreError(f"redis.url = {shown(url)!r} is not a Redis address: {error}; use redis://host:port/0") from None
    pool = client.connection_pool
    if owner:
        pool.connection_class = _ToOwnerByTLS if url.startswith("rediss:") else ToOwner
        pool.connection_kwargs["owner"] = owner
    else:
        by = {"rediss": _ToMasterByTLS, "unix": _ToMasterBySocket}
        pool.connection_class = by.get(url.partition(":")[0], _ToMasterByTCP)
    return client


def _check_certificates(path: str) -> None:
    try:
        ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise StoreError(f"cannot use redis.ca_file = {path!r}: {error}; name a file of certificates in PEM format") from None
