"""A TCP proxy between one pod and Redis that can simulate network failures.

Guarantees: bytes pass in order and unchanged, or the connection ends; while the proxy is cut, nothing passes either way and no
connection ends, as when packets are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

CHUNK_BYTES = 2**16


class Proxy:
    """Listens on `port` once started; `upstream` returns the current address of Redis."""

    def __init__(self, upstream: Callable[[], tuple[str, int] | None]) -> None:
        self._upstream = upstream
        self._flows = asyncio.Event()
        self._flows.set()
        self._lose = b""
        self._ends: dict[asyncio.StreamWriter, asyncio.StreamWriter] = {}  # towards Redis -> towards the pod
        self.port = 0
        self.lost: asyncio.Event = asyncio.Event()

    async def start(self, host: str = "127.0.0.1") -> None:
        """Start to listen."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening, and end every connection."""
        self._server.close()
        for upstream, downstream in list(self._ends.items()):
            upstream.close()
            downstream.close()

    def cut(self) -> None:
        """Block all traffic."""
        self._flows.clear()

    def mend(self) -> None:
        """Unblock traffic."""
        self._flows.set()

    def lose_reply(self, function: str) -> None:
        """Forward the next call of a Redis Function, and close its connection when the reply arrives; then set `lost`."""
        self._lose = f"_{function}\r\n".encode()
        self.lost.clear()

    def spare(self) -> None:
        """Cancel the loss of a reply."""
        self._lose = b""

    @property
    def addresses(self) -> list[str]:
        """Return this pod's connections, by the names that the server has for them."""
        return ["{}:{}".format(*upstream.get_extra_info("sockname")) for upstream in self._ends]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            place = self._upstream()
            if place is None:
                raise OSError("no Redis")
            replies, upstream = await asyncio.open_connection(*place)
        except OSError:  # Redis is down: the pod's connection is closed
            writer.close()
            return
        self._ends[upstream] = writer
        doomed = asyncio.Event()
        try:
            asked = asyncio.create_task(self._ask(reader, upstream, doomed))
            answered = asyncio.create_task(self._answer(replies, writer, doomed))
            await asyncio.wait([asked, answered], return_when=asyncio.FIRST_COMPLETED)
            for task in (asked, answered):
                task.cancel()
            await asyncio.wait([asked, answered])
        finally:
            del self._ends[upstream]
            upstream.close()
            writer.close()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, doomed: asyncio.Event) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await self._flows.wait()
                if self._lose and self._lose in data:
                    self._lose = b""
                    doomed.set()
                writer.write(data)
                await writer.drain()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, doomed: asyncio.Event) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await self._flows.wait()
                if doomed.is_set():
                    self.lost.set()
                    return
                writer.write(data)
                await writer.drain()
