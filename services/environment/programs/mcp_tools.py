"""The tools of an MCP server, as the policy calls them.

Guarantees: a call ends within its time limit with a text of bounded length for the model, or with `ServerLost`; every rollout has
a session of its own, begun with its first call, unless the environment says that rollouts may share one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Sequence
from typing import Any, cast

from services.environment.programs.frames import ProgramSetup
from services.environment.programs.loaded import BadReply
from services.environment.programs.tools import ANSWER_CHARACTERS, ERROR_CHARACTERS, Callee, shortened
from services.runtime.own_code import Unusable

START_LIMIT_S = 60.0
MOST_TOOLS = 1000
DESCRIBED_BYTES = 1 << 20
"""Largest description of all tools of a server, which every prompt would hold."""


class ServerLost(BadReply):
    """The connection to an MCP server could not be made, or has ended: the rollout fails, and starts again."""


class McpSession:
    """A connection to a server, from its first use to `close`. One task holds it, as the library demands."""

    def __init__(self, setup: ProgramSetup) -> None:
        self._setup = setup
        self._holding: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[Any] | None = None
        self._closing = asyncio.Event()

    @property
    def used(self) -> bool:
        """Whether the server may have been asked for anything."""
        return self._opened is not None

    async def client(self) -> Any:
        """Return the library's client, connected. Raises `ServerLost`."""
        if self._opened is None or (self._holding is not None and self._holding.done() and self._setup.shared):
            self._opened = asyncio.get_running_loop().create_future()
            self._holding = asyncio.create_task(self._hold(self._opened))
        return await asyncio.shield(self._opened)

    async def close(self) -> None:
        """End the connection, and the server if it was started for it."""
        self._closing.set()
        if self._holding is not None:
            if self._opened is not None and not self._opened.done():
                self._holding.cancel()
            await asyncio.gather(self._holding, return_exceptions=True)

    async def _hold(self, opened: asyncio.Future[Any]) -> None:
        from services.environment.programs.mcp_transport import StdioServer

        server = StdioServer(self._setup.command, os.getcwd())
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(START_LIMIT_S):
                    client = await stack.enter_async_context(await _client(self._setup, server, stack))
                opened.set_result(client)
                await self._closing.wait()
        except BaseException as error:  # of a server, or of the library that reads what it says
            if not opened.done():
                why = "; ".join([_reason(error), *server.errors])[: 3 * ERROR_CHARACTERS]
                opened.set_exception(ServerLost(f"the MCP server {named(self._setup)} cannot be used: {why}"))
                opened.exception()  # it may be that nobody waits
            if isinstance(error, asyncio.CancelledError):
                raise


async def _client(setup: ProgramSetup, server: Any, stack: contextlib.AsyncExitStack) -> Any:
    from mcp import Client

    if setup.command:
        return Client(server.streams())
    token = os.environ.get(setup.token_env, "") if setup.token_env else ""
    if setup.token_env and not token:
        raise ServerLost(f'token_env = "{setup.token_env}": the variable is not set; set it where the run is started')
    if not token:
        return Client(setup.url)
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    bearer = {"Authorization": f"Bearer {token}"}
    http = await stack.enter_async_context(httpx2.AsyncClient(headers=bearer, timeout=httpx2.Timeout(START_LIMIT_S, read=None)))
    return Client(streamable_http_client(setup.url, http_client=http))


class McpTool:
    """A tool of a server, in one rollout."""

    def __init__(self, described: dict[str, Any], session: McpSession, limit_s: float) -> None:
        self.name, self.described = described["function"]["name"], described
        self._session, self._limit_s = session, limit_s

    async def call(self, arguments: object) -> str:
        """Return what the tool says, or what is wrong. Raises `ServerLost`."""
        if not isinstance(arguments, dict):
            return "Error: arguments must be an object"
        client = await self._session.client()
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            async with asyncio.timeout(self._limit_s):
                return said_by(await client.call_tool(self.name, cast("dict[str, Any]", arguments)))
        except TimeoutError:
            return f"Error: the tool took longer than {self._limit_s:g} s"
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise ServerLost(f"the MCP server ended during a call of {self.name!r}") from None
            return f"Error: {error.message}"[:ERROR_CHARACTERS]
        except Exception as error:  # an answer that the library refuses
            return f"Error: {_reason(error)}"


class McpToolSet:
    """The tools of a server, in one rollout."""

    def __init__(self, described: Sequence[dict[str, Any]], setup: ProgramSetup, shared: McpSession | None) -> None:
        self._session = shared or McpSession(setup)
        self._own = shared is None
        self.tools: Sequence[Callee] = [McpTool(each, self._session, setup.tool_timeout_s) for each in described]

    def snapshot(self) -> Any:
        """Return that there is no state, where there is none: the server is shared, or was not asked yet."""
        return None if self._own and self._session.used else {}

    def restore(self, state: Any) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """End the rollout's own session."""
        if self._own:
            await self._session.close()


async def listed(session: McpSession) -> list[dict[str, Any]]:
    """Return the descriptions of a server's tools, in OpenAI's form. Raises `ServerLost`, `Unusable`."""
    client, cursor = await session.client(), None
    found: list[dict[str, Any]] = []
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            found.append({"type": "function", "function": function})
        cursor = page.next_cursor
        if not cursor:
            break
        if len(found) > MOST_TOOLS:
            raise Unusable(f"the MCP server lists more than {MOST_TOOLS} tools")
    if not found:
        raise Unusable("the MCP server lists no tools")
    if len(json.dumps(found)) > DESCRIBED_BYTES:
        raise Unusable(f"the descriptions of the MCP server's tools have more than {DESCRIBED_BYTES} bytes")
    return found


def said_by(result: Any) -> str:
    """Return the text of a call's result; content of other types is named."""
    parts: list[str] = []
    for block in result.content:
        inner = getattr(block, "resource", block)
        text = getattr(inner, "text", None)
        parts.append(text if isinstance(text, str) else f"[{block.type}]")
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False, default=str)]
    text = shortened("\n".join(parts), ANSWER_CHARACTERS)
    return f"Error: {text}" if result.is_error and not text.startswith("Error") else text


def named(setup: ProgramSetup) -> str:
    """Return how messages name a server."""
    return repr(setup.url or " ".join(setup.command))


def _reason(error: BaseException) -> str:
    """Return what was raised; of a group of exceptions, the first."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS]
