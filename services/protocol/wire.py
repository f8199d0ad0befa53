"""A thin way to Redis for the hot path: payloads are sent without being joined to what stands around them, and read in place.

Guarantees: every wait has a limit; a request whose connection broke is sent again, by the retry rule of the client it stands
beside, so every command must bear being sent twice; a connection on which a request failed or was cancelled is closed.
For plain TCP only: over TLS and unix sockets the store uses redis-py, which takes about twice the CPU time for a payload.
"""

from __future__ import annotations

import asyncio
import builtins
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

import redis.asyncio as aioredis
from redis.exceptions import AuthenticationError, BusyLoadingError, ConnectionError, OutOfMemoryError, ResponseError, TimeoutError

from services.protocol.cluster import ELSEWHERE, Elsewhere, Owner, ToOwner

BUFFER_BYTES = 2**18  # of a connection, to read into; grows with the largest string
APART_BYTES = 2**13  # a string of more is sent as it lies in memory: below that, joining it costs less than another piece
PIECES = 512  # in one system call; Linux takes 1024
LONGEST = 2**29  # bytes that Redis takes for a string: a reply of more is none of Redis
VANISHED = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 3, socket.TCP_KEEPCNT: 3, socket.TCP_USER_TIMEOUT: 10_000}
"""TCP's options for a host that is gone without a word: a lost connection after 10 s with data under way, after 20 s without. A
server that stalls is not concerned: its host acknowledges."""
_ERRORS = {"OOM": OutOfMemoryError, "NOAUTH": AuthenticationError, "WRONGPASS": AuthenticationError, "LOADING": BusyLoadingError}
# A server that reads its append-only file, or a node that does not own the slot: to be awaited like one that starts.
_LATER = (BusyLoadingError, Elsewhere)

Take = Callable[[memoryview], Any]


class Wire:
    """Connections to the server of `client`, one for each request under way. Speaks RESP2."""

    def __init__(self, client: aioredis.Redis) -> None:
        self._settings = client.connection_pool.connection_kwargs
        self._idle: list[_Line] = []

    @classmethod
    def beside(cls, client: aioredis.Redis) -> Wire | None:
        """The wire to the same server, with the client's limits; None when that is not reached by plain TCP."""
        if client.connection_pool.connection_class not in (aioredis.Connection, ToOwner):
            return None
        return _wires.setdefault(client, cls(client))

    async def ask(self, commands: Sequence[tuple[Any, ...]], take: Take = bytes) -> list[Any]:
        """Send commands in one go; their replies, an error among them as a value.

        `take` makes a value of every string in them: it sees the bytes in place, and must not keep them.
        """
        pieces = _pieces(commands)
        return await self._settings["retry"].call_with_retry(lambda: self._once(pieces, len(commands), take), self._forget)

    def close(self) -> None:
        """Close the connections that are not in use."""
        while self._idle:
            self._idle.pop().close()

    async def _forget(self, _error: Exception) -> None:
        """One connection broke: the others, opened to the same server, are not to be trusted."""
        self.close()

    async def _once(self, pieces: Sequence[bytes], count: int, take: Take) -> list[Any]:
        line = self._idle.pop() if self._idle else await self._connect()
        try:
            async with _limit(self._settings["socket_timeout"]):
                replies = await line.ask(pieces, count, take)
        except BaseException:  # cancellation too: who knows what is still under way on it
            line.close()
            raise
        self._idle.append(line)
        for reply in replies:
            if isinstance(reply, _LATER):
                raise reply
        return replies

    async def _connect(self) -> _Line:
        settings = self._settings
        greeting: list[tuple[Any, ...]] = []
        if settings.get("password"):
            greeting.append(("AUTH", *filter(None, [settings.get("username")]), settings["password"]))
        if settings.get("db"):
            greeting.append(("SELECT", settings["db"]))
        async with _limit(settings["socket_connect_timeout"]):
            owner: Owner | None = settings.get("owner")
            host, port = await owner.find() if owner else (settings.get("host", "localhost"), settings.get("port", 6379))
            line = await _Line.open(host, port)
            try:
                for reply in await line.ask(_pieces(greeting), len(greeting), bytes):
                    if isinstance(reply, Exception):
                        raise reply
            except BaseException:
                line.close()
                raise
        return line


_wires: WeakKeyDictionary[aioredis.Redis, Wire] = WeakKeyDictionary()  # stores that share a client share its wire


@asynccontextmanager
async def _limit(seconds: float) -> AsyncIterator[None]:
    """Errors of the socket, and a wait past the limit, as the errors that the retry rule knows."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except builtins.TimeoutError:
        raise TimeoutError(f"no answer for {seconds:g} s") from None
    except OSError as error:
        raise ConnectionError(str(error)) from None


class _Line:
    """One connection. What was received and not read yet is `buffer[begin:end]`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer, self._begin, self._end = bytearray(BUFFER_BYTES), 0, 0

    @classmethod
    async def open(cls, host: str, port: int) -> _Line:
        loop, failures = asyncio.get_running_loop(), []
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

    async def ask(self, pieces: Sequence[bytes], count: int, take: Take) -> list[Any]:
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
        return [await self._reply(take) for _ in range(count)]

    async def _reply(self, take: Take) -> Any:
        while (at := self._buffer.find(b"\r\n", self._begin, self._end)) < 0:
            await self._receive(self._end - self._begin + 1)
        line = self._buffer[self._begin : at].decode(errors="replace")
        kind, rest, self._begin = line[:1], line[1:], at + 2
        match kind:
            case "+":
                return rest.encode()
            case "-":
                word = rest.partition(" ")[0]
                error = Elsewhere if word in ELSEWHERE else _ERRORS.get(word, ResponseError)
                return error(rest.removeprefix("ERR "))
            case "$" | "*" | ":" if rest.removeprefix("-").isdecimal():
                number = int(rest)
                if kind == ":":
                    return number
                if number < 0:
                    return None
                return await self._string(number, take) if kind == "$" else [await self._reply(take) for _ in range(number)]
        raise ConnectionError(f"{line[:60]!r} is no reply of Redis")

    async def _string(self, size: int, take: Take) -> Any:
        if size > LONGEST:
            raise ConnectionError(f"a string of {size} bytes is no reply of Redis")
        if self._end - self._begin < size + 2:
            await self._receive(size + 2)
        begin = self._begin
        self._begin += size + 2
        return take(memoryview(self._buffer)[begin : begin + size])

    async def _receive(self, size: int) -> None:
        """Wait until at least `size` bytes lie in the buffer."""
        if self._begin + size > len(self._buffer):
            waiting = self._buffer[self._begin : self._end]
            if size > len(self._buffer):
                self._buffer = bytearray(2 * size)
            self._buffer[: len(waiting)] = waiting
            self._begin, self._end = 0, len(waiting)
        loop = asyncio.get_running_loop()
        while self._end - self._begin < size:
            received = await loop.sock_recv_into(self._sock, memoryview(self._buffer)[self._end :])
            if not received:
                raise ConnectionError("the server closed the connection")
            self._end += received


def _pieces(commands: Sequence[tuple[Any, ...]]) -> list[bytes]:
    """Commands as bytes to send one after another; long strings stand by themselves."""
    pieces, small = [], []
    for command in commands:
        small.append(b"*%d\r\n" % len(command))
        for part in command:
            if isinstance(part, bytes):
                data = part
            else:
                assert isinstance(part, str | int | float), f"{part!r} is no argument of a command"
                data = str(part).encode()
            if len(data) < APART_BYTES:
                small.append(b"$%d\r\n%b\r\n" % (len(data), data))
            else:
                small.append(b"$%d\r\n" % len(data))
                pieces += (b"".join(small), data)
                small = [b"\r\n"]
    return [*pieces, b"".join(small)] if small else []
