"""The plain Redis commands that the store sends, with their replies as values: bytes, integers and, for scores, floats."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeVar, overload

T = TypeVar("T")

StreamEntry = tuple[bytes, dict[bytes, bytes]]
"""An entry of a stream: its id and its fields."""


class Subscription(Protocol):
    """Messages of subscribed channels."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def subscribe(self, *channels: str) -> Awaitable[None]: ...

    def get_message(self, *, timeout: float) -> Awaitable[dict[str, Any] | None]: ...


class Commands:
    """Commands of one connection, each sent alone."""

    def __init__(self, send: Callable[..., Awaitable[list[Any]]]) -> None:
        """`send`: sends commands and returns their replies."""
        self._send = send

    async def get(self, name: str) -> bytes | None:
        """Return a string."""
        return await self._reply("GET", name)

    async def hget(self, name: str, key: str) -> bytes | None:
        """Return a field of a hash."""
        return await self._reply("HGET", name, key)

    async def hmget(self, name: str, *keys: str) -> list[bytes | None]:
        """Return fields of a hash, read at the same instant."""
        return await self._reply("HMGET", name, *keys)

    async def hgetall(self, name: str) -> dict[bytes, bytes]:
        """Return a hash, empty if there is none."""
        return dict(pairs(await self._reply("HGETALL", name)))

    async def hscan(self, name: str, cursor: int, *, count: int) -> tuple[int, dict[bytes, bytes]]:
        """Return some fields of a hash and the next cursor, which is 0 at the end."""
        following, flat = await self._reply("HSCAN", name, cursor, "COUNT", count)
        return int(following), dict(pairs(flat))

    async def xlen(self, name: str) -> int:
        """Return the number of a stream's entries."""
        return await self._reply("XLEN", name)

    async def xrange(self, name: str, min: str = "-", max: str = "+", count: int | None = None) -> list[StreamEntry]:
        """Return entries of a stream, the oldest first."""
        return _entries(await self._reply("XRANGE", name, min, max, *_limited(count)))

    async def xrevrange(self, name: str, max: str = "+", min: str = "-", count: int | None = None) -> list[StreamEntry]:
        """Return entries of a stream, the newest first."""
        return _entries(await self._reply("XREVRANGE", name, max, min, *_limited(count)))

    @overload
    async def zrange(self, name: str, start: int, end: int, *, desc: bool = False) -> list[bytes]: ...

    @overload
    async def zrange(
        self, name: str, start: int, end: int, *, desc: bool = False, withscores: Literal[True]
    ) -> list[tuple[bytes, float]]: ...

    async def zrange(self, name: str, start: int, end: int, *, desc: bool = False, withscores: bool = False) -> list[Any]:
        """Return members of a sorted set by rank, with their scores if requested."""
        found = await self._reply("ZRANGE", name, start, end, *["REV"] * desc, *["WITHSCORES"] * withscores)
        return [(member, float(score)) for member, score in pairs(found)] if withscores else found

    async def zmscore(self, key: str, members: list[str]) -> list[float | None]:
        """Return the scores of members; None for a missing member."""
        return [None if score is None else float(score) for score in await self._reply("ZMSCORE", key, *members)]

    async def _reply(self, *command: Any) -> Any:
        (reply,) = await self._send(command)
        return reply


def _limited(count: int | None) -> tuple[Any, ...]:
    return () if count is None else ("COUNT", count)


def pairs(flat: list[T]) -> Iterator[tuple[T, T]]:
    """Return the pairs in a reply that lists names and values in turn."""
    return zip(flat[::2], flat[1::2], strict=True)


def _entries(found: list[Any]) -> list[StreamEntry]:
    return [(id, dict(pairs(fields))) for id, fields in found]
