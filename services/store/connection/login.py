"""How a Redis server is reached: credentials, address, limits of every wait."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit, urlunsplit

VANISHED = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 3, socket.TCP_KEEPCNT: 3, socket.TCP_USER_TIMEOUT: 10_000}
"""TCP options for a host that vanishes silently: the connection is lost after 10 s with data in flight, after 20 s without. A
server that stalls is not affected, because its host acknowledges.
"""
Address = tuple[str, int]
BACKOFF_S, LONGEST_BACKOFF_S = 0.05, 1.0  # between attempts, doubling
AGAIN_S = 15.0
"""How much longer than one reply a request may take with all its attempts: enough for an outage and a slow reply after it."""
DEFAULT_PORT = 6379


@dataclass(frozen=True)
class Login:
    """A client's credentials, and how it verifies the server."""

    password: str = field(default="", repr=False)
    user: str = ""
    """User name; empty: the one in the address, or the server's default user."""
    ca_file: str = ""
    """CA bundle used to verify the server certificate of `rediss://`; empty: the system's."""


class Owner(Protocol):
    """Knows the server that serves a run in a Cluster."""

    async def find(self) -> Address:
        """Return its current address. Raises `ConnectionError`."""
        ...


@dataclass(frozen=True)
class Limits:
    """Limits of a client's waits."""

    retries: int
    connect_s: float
    reply_s: float


def direct(url: str, login: Login, limits: Limits) -> dict[str, Any] | None:
    """Return the settings of a plain TCP connection, with redis-py's names; None: the address is of another kind, or only
    redis-py can tell what is wrong with it. The address takes precedence over `login`.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or DEFAULT_PORT
        db = int(parts.path.strip("/") or 0)
    except ValueError:
        return None
    if parts.scheme != "redis" or parts.query:
        return None
    return {
        "host": unquote(parts.hostname or "localhost"), "port": port, "db": db,
        "username": unquote(parts.username or "") or login.user, "password": unquote(parts.password or "") or login.password,
        "socket_connect_timeout": limits.connect_s, "socket_timeout": limits.reply_s, "retries": limits.retries,
    }  # fmt: skip


def shown(url: str) -> str:
    """Return the address without user and password, safe to log."""
    return re.sub(r"//.*@", "//", url)


def masked(text: str) -> str:
    """Return an address, or a text that ends with one, with `PASSWORD` in place of its password."""
    return re.sub(r"(://[^:/@]*):.+@", r"\1:PASSWORD@", text)


def split_password(url: str) -> tuple[str, str]:
    """Split a Redis address into the address without password, which may be shown, and the password, which may not."""
    parts = urlsplit(url)
    if not parts.password:
        return url, ""
    user = f"{parts.username}@" if parts.username else ""
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=user + place)), unquote(parts.password)
