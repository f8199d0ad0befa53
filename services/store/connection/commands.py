"""The plain Redis commands that the store sends, typed by their replies here.

redis-py types its asynchronous commands for every mode of a connection at once, so a reply has no useful type. The store's
connections leave replies as bytes, which makes each of them definite. `typed` states that once, for an existing client.
"""

from __future__ import annotations

from collections.abc import Awaitable
from types import TracebackType
from typing import Any, Literal, Protocol, Self, cast, overload

import redis.asyncio as aioredis

StreamEntry = tuple[bytes, dict[bytes, bytes]]
"""An entry of a stream: its id and its fields."""


class Pipeline(Protocol):
    """Commands that are sent together when `execute` is awaited."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def execute_command(self, *command: Any) -> object: ...

    def hget(self, name: str, key: str | bytes) -> object: ...

    def xpending_range(self, name: str, groupname: str, min: str | bytes, max: str | bytes, count: int) -> object: ...

    def execute(self, raise_on_error: bool = True) -> Awaitable[list[Any]]: ...


class Subscription(Protocol):
    """Messages of subscribed channels."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def subscribe(self, *channels: str) -> Awaitable[None]: ...

    def psubscribe(self, *patterns: str) -> Awaitable[None]: ...

    def get_message(self, *, timeout: float) -> Awaitable[dict[str, Any] | None]: ...


class Commands(Protocol):
    """Commands of one client. Replies are as the server sends them: bytes and integers, with scores as floats."""

    def execute_command(self, *command: Any) -> Awaitable[Any]: ...

    def info(self, section: str | None = None) -> Awaitable[dict[str, Any]]: ...

    def time(self) -> Awaitable[tuple[int, int]]: ...

    def get(self, name: str) -> Awaitable[bytes | None]: ...

    def hget(self, name: str, key: str) -> Awaitable[bytes | None]: ...

    def hgetall(self, name: str) -> Awaitable[dict[bytes, bytes]]: ...

    def hscan(self, name: str, cursor: int = 0, *, count: int | None = None) -> Awaitable[tuple[int, dict[bytes, bytes]]]: ...

    def xlen(self, name: str) -> Awaitable[int]: ...

    def xrange(self, name: str, min: str = "-", max: str = "+", count: int | None = None) -> Awaitable[list[StreamEntry]]: ...

    def xrevrange(self, name: str, max: str = "+", min: str = "-", count: int | None = None) -> Awaitable[list[StreamEntry]]: ...

    @overload
    def zrange(self, name: str, start: int, end: int, *, desc: bool = False) -> Awaitable[list[bytes]]: ...

    @overload
    def zrange(
        self, name: str, start: int, end: int, *, desc: bool = False, withscores: Literal[True]
    ) -> Awaitable[list[tuple[bytes, float]]]: ...

    def zmscore(self, key: str, members: list[str]) -> Awaitable[list[float | None]]: ...

    def pipeline(self, transaction: bool = True) -> Pipeline: ...

    def pubsub(self, *, ignore_subscribe_messages: bool = False) -> Subscription: ...


def typed(client: aioredis.Redis) -> Commands:
    """Return the client itself, with the types above."""
    return cast("Commands", client)
