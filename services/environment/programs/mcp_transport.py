"""MCP over the standard input and output of a server that is started here.

Guarantees: what a server writes besides messages is skipped; one that writes an endless line loses its connection. When the
connection ends, the server's process group is killed. The last lines of its standard error are kept for error messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

LINE_BYTES = 16 << 20
"""Largest message of a server."""
GRACE_S = 0.5
"""For which a server may go on after its input has ended."""
ERROR_LINES = 5

Incoming = MemoryObjectSendStream["SessionMessage | Exception"]


class StdioServer:
    """A server's process, from entering the context `streams` to leaving it."""

    def __init__(self, command: Sequence[str], folder: str) -> None:
        self._command, self._folder = command, folder
        self.errors: deque[str] = deque(maxlen=ERROR_LINES)
        """What it wrote last to standard error."""

    @contextlib.asynccontextmanager
    async def streams(self) -> AsyncGenerator[tuple[Any, Any]]:
        """Start the server; give what it says and what it is told. Raises OSError if it cannot be started."""
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            limit=LINE_BYTES, start_new_session=True, cwd=self._folder,
        )  # fmt: skip
        said_in, said = anyio.create_memory_object_stream["SessionMessage | Exception"](0)
        told, told_out = anyio.create_memory_object_stream["SessionMessage"](0)
        works = [
            asyncio.ensure_future(work)
            for work in (_listen(process, said_in), _tell(process, told_out, said_in), self._note(process))
        ]
        try:
            yield said, told
        finally:
            for stream in (said, told, said_in, told_out):
                stream.close()
            await _end(process)
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)

    async def _note(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while data := await process.stderr.read(1 << 16):
            self.errors.extend(line[:500] for line in data.decode(errors="replace").splitlines()[-ERROR_LINES:] if line.strip())


async def _listen(process: asyncio.subprocess.Process, said: Incoming) -> None:
    """Pass on what the server says until it ends, or writes a line that is too long."""
    assert process.stdout is not None
    with said, contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, ValueError):  # ValueError: too long
        while line := await process.stdout.readline():
            try:
                message = jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError:  # something that it printed
                continue
            await said.send(SessionMessage(message))


async def _tell(process: asyncio.subprocess.Process, told: MemoryObjectReceiveStream[SessionMessage], said: Incoming) -> None:
    """Write to the server what it is told; if it does not read, close what it says, too."""
    assert process.stdin is not None
    try:
        async for message in told:
            process.stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
            await process.stdin.drain()
    except (ConnectionError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        said.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(process.wait()), GRACE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # also what it has started
    await process.wait()
