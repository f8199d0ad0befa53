"""MCP over the standard input and output of a server that is started here, and over HTTP.

Guarantees: any output of a started server other than messages is skipped. A server that sends an endless message loses its
connection, and so does one over HTTP that fails or has forgotten the session: these are not answers of a tool. When the
connection ends, a started server's process group is killed. The last lines of its standard error are kept for error messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from functools import cache
from typing import Any

import anyio
import httpx2
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.streamable_http import MCP_SESSION_ID, streamable_http_client
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

MESSAGE_BYTES = 16 << 20
"""Largest message of a server."""
CONNECT_S = 60.0
GRACE_S = 0.5
"""How long a server may keep running after its input has ended."""
ERROR_LINES = 5

Incoming = MemoryObjectSendStream["SessionMessage | Exception"]


class StdioServer:
    """A server's process, from entering the context `streams` to leaving it."""

    def __init__(self, command: Sequence[str], folder: str) -> None:
        self._command, self._folder = command, folder
        self.errors: deque[str] = deque(maxlen=ERROR_LINES)
        """The end of its standard error."""

    @contextlib.asynccontextmanager
    async def streams(self) -> AsyncGenerator[tuple[Any, Any]]:
        """Start the server; yield its output and input streams. Raises OSError if it cannot be started."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=MESSAGE_BYTES,
            start_new_session=True,
            cwd=self._folder,
        )
        said_in, said = anyio.create_memory_object_stream["SessionMessage | Exception"](0)
        told, told_out = anyio.create_memory_object_stream["SessionMessage"](0)
        works = [asyncio.ensure_future(work) for work in (_listen(process, said_in), _tell(process, told_out, said_in))]
        noting = asyncio.ensure_future(self._note(process))
        try:
            yield said, told
        finally:
            for stream in (said, told, said_in, told_out):
                stream.close()
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)
            await _end(process)
            noting.cancel()
            await asyncio.gather(noting, return_exceptions=True)

    async def _note(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while data := await process.stderr.read(1 << 16):
            self.errors.extend(line[:500] for line in data.decode(errors="replace").splitlines()[-ERROR_LINES:] if line.strip())


async def _listen(process: asyncio.subprocess.Process, said: Incoming) -> None:
    """Forward the server's messages until it exits, or writes a line that is too long."""
    assert process.stdout is not None
    with said, contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, ValueError):  # ValueError: too long
        while line := await process.stdout.readline():
            try:
                message = jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError:  # something that it printed
                continue
            await said.send(SessionMessage(message))


async def _tell(process: asyncio.subprocess.Process, told: MemoryObjectReceiveStream[SessionMessage], said: Incoming) -> None:
    """Write messages to the server. If that fails, close the stream of its answers as well, so that no call waits for one."""
    assert process.stdin is not None
    with said, contextlib.suppress(ConnectionError, anyio.BrokenResourceError, anyio.ClosedResourceError, ValueError):
        async for message in told:  # ValueError: it cannot be encoded
            process.stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
            await process.stdin.drain()


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a server and its process group. The rest of its output is read: otherwise asyncio does not notice its exit."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    draining = asyncio.ensure_future(_drained(process.stdout))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(process.wait()), GRACE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):  # a process in its own session may hold its output: it ends with the worker
        await asyncio.wait_for(asyncio.shield(process.wait()), GRACE_S)
    draining.cancel()
    await asyncio.gather(draining, return_exceptions=True)


async def _drained(stream: asyncio.StreamReader) -> None:
    while await stream.read(1 << 16):
        pass


@contextlib.asynccontextmanager
async def over_http(url: str, token: str) -> AsyncGenerator[tuple[Any, Any]]:
    """Yield the input and output streams of the server at `url`; `token` empty: none is sent."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    waits = httpx2.Timeout(CONNECT_S, read=None)
    async with (
        _CarefulClient(headers=headers, timeout=waits, verify=_trusted() if url.startswith("https:") else False) as http,
        streamable_http_client(url, http_client=http, max_sse_event_size=MESSAGE_BYTES) as streams,
    ):
        yield streams


class _CarefulClient(httpx2.AsyncClient):
    """Raises for responses that end a session, and for messages that are too long; the library limits events of a stream."""

    async def send(self, request: httpx2.Request, *, stream: bool = False, **keys: Any) -> httpx2.Response:
        """Return the response. Raises `httpx2.TransportError`, which ends the connection."""
        request.headers["accept-encoding"] = "identity"  # the size of a few decompressed bytes has no limit
        response = await super().send(request, stream=True, **keys)
        kind, status = response.headers.get("content-type", "").lower(), response.status_code
        forgotten = status == 404 and MCP_SESSION_ID in request.headers
        if request.method == "POST" and (
            status >= 500 or forgotten or (status >= 400 and not kind.startswith("application/json"))
        ):
            await response.aclose()
            raise httpx2.RemoteProtocolError(f"the server answered with status {status}", request=request)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise httpx2.RemoteProtocolError("the server compresses its answers without being asked", request=request)
        if not kind.startswith("text/event-stream"):
            response.stream = _Limited(response.stream, request)
        if not stream:
            await response.aread()
        return response


class _Limited(httpx2.AsyncByteStream):
    """A body that fails with an error once it is too long."""

    def __init__(self, body: Any, request: httpx2.Request) -> None:
        self._body, self._request = body, request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for piece in self._body:
            size += len(piece)
            if size > MESSAGE_BYTES:
                raise httpx2.ReadError(f"an answer has more than {MESSAGE_BYTES >> 20} MiB", request=self._request)
            yield piece

    async def aclose(self) -> None:
        """Close the body."""
        await self._body.aclose()


@cache
def _trusted() -> ssl.SSLContext:
    """Return the certificates that are trusted: reading them for each session would take longer than most calls."""
    return ssl.create_default_context()
