"""A fast connection to Redis for the hot path: requests go straight to the socket without copying payloads, replies straight into
hiredis' parser.

Guarantees: every wait has a limit, and so have a request's attempts together; a request whose connection broke is sent again, by
the retry rule of its redis-py client, so every command must be safe to send twice; a connection on which a request failed or was
cancelled is closed.
For plain TCP only: over TLS and unix sockets the store uses redis-py, which takes about twice the CPU time for a payload.
"""

from __future__ import annotations

import asyncio
import builtins
import socket
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import hiredis

from services.store.connection.login import AGAIN_S, VANISHED, Owner
from services.store.connection.replies import LATER, ErrorReply

if TYPE_CHECKING:
    import redis.asyncio as aioredis
    from redis.exceptions import RedisError

BUFFER_BYTES = 2**18  # received at a time
APART_BYTES = 2**13  # longer strings are sent from their own memory; below this, copying costs less than another piece
PIECES = 512  # in one system call; Linux takes 1024
_MORE = object()  # the parser does not have a complete reply yet


def redis_error(reply: ErrorReply) -> RedisError:
    """Return redis-py's exception for an error reply, to be raised. Its import takes longer than most requests."""
    from services.store.connection.exceptions import exception_of

    return exception_of(reply)


class FastConnection:
    """Connections to a server, one per concurrent request. Speaks RESP2."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """`settings`: those of a redis-py connection; instead of `retry`, they may have the number of `retries`."""
        self._settings = settings
        self._idle: list[_Line] = []

    @classmethod
    def beside(cls, client: aioredis.Redis) -> FastConnection | None:
        """Return the fast connection to the same server, with the client's limits; None if it is not reached by plain TCP."""
        import redis.asyncio as aioredis

        kind = client.connection_pool.connection_class
        if not issubclass(kind, aioredis.Connection) or issubclass(kind, aioredis.SSLConnection):
            return None
        return _connections.setdefault(client, cls(client.connection_pool.connection_kwargs))

    def belongs_to(self, client: aioredis.Redis) -> None:
        """Make `beside` return this connection for the client, which uses the same server."""
        _connections[client] = self

    async def ask(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send commands in one request. Returns their replies, with errors as values."""
        pieces, began = _pieces(commands), time.monotonic()
        try:
            return await self._once(pieces, len(commands))
        except Exception as error:  # of any kind: the retry rule decides which to retry
            async with limit(self._settings["socket_timeout"] + AGAIN_S, began):
                return await self._again(error, pieces, len(commands))

    def close(self) -> None:
        """Close the connections that are not in use."""
        while self._idle:
            self._idle.pop().close()

    async def _again(self, error: Exception, pieces: Sequence[bytes], count: int) -> list[Any]:
        """Retry by redis-py's rule, after a first attempt that ended with `error`. Importing redis-py takes longer than most
        requests.
        """
        from services.store.connection.exceptions import retry_rule

        failed: list[Exception] = [error]

        async def attempt() -> list[Any]:
            if failed:
                raise failed.pop()
            return await self._once(pieces, count)

        rule = self._settings.get("retry") or retry_rule(self._settings["retries"])
        return await rule.call_with_retry(attempt, self._forget)

    async def _forget(self, _error: Exception) -> None:
        """Distrust the idle connections after one broke, because they lead to the same server."""
        self.close()

    async def _once(self, pieces: Sequence[bytes], count: int) -> list[Any]:
        line = self._idle.pop() if self._idle else await self._connect()
        try:
            async with limit(self._settings["socket_timeout"]):
                replies = await line.ask(pieces, count)
        except BaseException:  # cancellation too: unknown data may still be in flight on it
            line.close()
            raise
        self._idle.append(line)
        for reply in replies:
            if isinstance(reply, ErrorReply) and reply.word in LATER:
                raise redis_error(reply)
        return replies

    async def _connect(self) -> _Line:
        settings = self._settings
        greeting: list[tuple[Any, ...]] = []
        if settings.get("password"):
            greeting.append(("AUTH", *filter(None, [settings.get("username")]), settings["password"]))
        if settings.get("db"):
            greeting.append(("SELECT", settings["db"]))
        async with limit(settings["socket_connect_timeout"]):
            owner: Owner | None = settings.get("owner")
            host, port = await owner.find() if owner else (settings.get("host", "localhost"), settings.get("port", 6379))
            line = await _Line.open(host, port)
            try:
                for reply in await line.ask(_pieces(greeting), len(greeting)):
                    if isinstance(reply, ErrorReply):
                        raise redis_error(reply)
            except BaseException:  # cancellation too: nobody else would close it
                line.close()
                raise
        return line


_connections: WeakKeyDictionary[aioredis.Redis, FastConnection] = WeakKeyDictionary()  # shared with the client


@asynccontextmanager
async def limit(seconds: float, began: float | None = None) -> AsyncGenerator[None]:
    """Turn errors of the socket or of the protocol, and a wait past the limit, into errors that the retry rule knows.

    `began`: the monotonic time from which the limit counts; None: now.
    """
    spent = 0.0 if began is None else time.monotonic() - began
    try:
        async with asyncio.timeout(seconds - spent):
            yield
    except (OSError, hiredis.ProtocolError) as error:  # a wait past the limit is an `OSError`
        from redis.exceptions import ConnectionError, TimeoutError

        if isinstance(error, builtins.TimeoutError):
            raise TimeoutError(f"no answer for {seconds:g} s") from None
        raise ConnectionError(str(error)) from None


class _Line:
    """One connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray(BUFFER_BYTES)
        self._reader = hiredis.Reader(replyError=_error, notEnoughData=_MORE)

    @classmethod
    async def open(cls, host: str, port: int) -> _Line:
        loop, failures = asyncio.get_running_loop(), list[str]()
        for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in VANISHED.items():
                    sock.setsockopt(socket.IPPROTO_TCP, option, value)
                await loop.sock_connect(sock, address)
                return cls(sock)
            except BaseException as error:  # cancellation too
                sock.close()
                if not isinstance(error, OSError):
                    raise
                failures.append(str(error))
        raise OSError("; ".join(failures))

    def close(self) -> None:
        self._sock.close()

    async def ask(self, pieces: Sequence[bytes], count: int) -> list[Any]:
        loop = asyncio.get_running_loop()
        for start in range(0, len(pieces), PIECES):
            group = pieces[start : start + PIECES]
            try:
                sent = self._sock.sendmsg(group)
            except BlockingIOError:
                sent = 0
            for piece in group:
                if sent < len(piece):
                    await loop.sock_sendall(self._sock, memoryview(piece)[sent:])
                sent = max(sent - len(piece), 0)
        return [await self._reply() for _ in range(count)]

    async def _reply(self) -> Any:
        loop = asyncio.get_running_loop()
        while (reply := self._reader.gets()) is _MORE:
            if not (received := await loop.sock_recv_into(self._sock, self._buffer)):
                raise ConnectionResetError("the server closed the connection")
            self._reader.feed(self._buffer, 0, received)
        return reply


def _error(message: str) -> ErrorReply:
    return ErrorReply(message.removeprefix("ERR "))


def _pieces(commands: Sequence[tuple[Any, ...]]) -> list[bytes]:
    """Return commands as bytes to send one after another; long strings are separate pieces."""
    pieces: list[bytes] = []
    for command in commands:
        if any(map(_is_long, command)):
            pieces += _apart(command)
        else:
            pieces.append(hiredis.pack_command(command))
    return pieces


def _is_long(part: Any) -> bool:
    return type(part) is bytes and len(part) >= APART_BYTES


def _apart(command: tuple[Any, ...]) -> Iterator[bytes]:
    around = [b"*%d\r\n" % len(command)]
    for part in command:
        if _is_long(part):
            yield b"".join((*around, b"$%d\r\n" % len(part)))
            yield part
            around = [b"\r\n"]
        else:
            around.append(hiredis.pack_command((part,)).removeprefix(b"*1\r\n"))
    yield b"".join(around)
