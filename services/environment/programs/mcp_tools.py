"""The tools of an MCP server, as the policy calls them.

Guarantees: a call ends within its time limit with a text of bounded length for the model, or with `ServerLost`; every rollout has
its own session, begun with its first call, unless the environment says that rollouts may share one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Sequence
from typing import Any, cast

from pydantic_core import ValidationError, to_json

from services.config.secrets import read_token
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
    """A connection to a server, from its first use to `close`. One task holds it, as the library requires.

    If it ends, a session shared by rollouts is reopened on its next use; any other is not, since its server has lost its state.
    """

    def __init__(self, setup: ProgramSetup) -> None:
        self._setup = setup
        self._held: HeldSession | None = None

    @property
    def name(self) -> str:
        """How messages name the server."""
        return named(self._setup)

    @property
    def used(self) -> bool:
        """Whether any request may have reached the server."""
        return self._held is not None

    async def client(self) -> Any:
        """Return the library's client, connected. Raises `ServerLost`."""
        if self._held is None or (self._setup.shared and self._held.over):
            self._held = HeldSession(self._setup)
        held = self._held
        client = await asyncio.shield(held.opened)
        if held.over:  # otherwise the library's error for a closed client would be taken for a tool's output
            raise ServerLost(f"the connection to the MCP server {named(self._setup)} has ended{held.why}"[:ERROR_CHARACTERS])
        return client

    def lost(self, client: Any) -> str:
        """Note that a client's connection has ended. Return what its server last wrote to standard error."""
        if self._held is None or not self._held.is_of(client):
            return ""
        self._held.closing.set()
        return self._held.errors

    async def close(self) -> None:
        """End the connection, and the server if it was started for it."""
        if self._held is not None:
            await self._held.close()


class HeldSession:
    """A connection, and the task that holds it."""

    def __init__(self, setup: ProgramSetup) -> None:
        self._setup = setup
        self.closing = asyncio.Event()
        self.why = ""
        """What ended the connection, for a message; empty: `closing`."""
        self._server: Any = None
        self.opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold())

    @property
    def over(self) -> bool:
        """Whether the connection has ended, or is about to."""
        return self._task.done() or self.closing.is_set()

    @property
    def errors(self) -> str:
        """The last lines that a started server has written to standard error."""
        return "; ".join(self._server.errors) if self._server else ""

    def is_of(self, client: Any) -> bool:
        """Return whether a client is the one of this connection."""
        return (
            self.opened.done() and not self.opened.cancelled() and not self.opened.exception() and self.opened.result() is client
        )

    async def close(self) -> None:
        """End it."""
        self.closing.set()
        if not self.opened.done():
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _hold(self) -> None:
        from services.environment.programs.mcp_transport import StdioServer, over_http

        server = self._server = StdioServer(self._setup.command, os.getcwd())
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(START_LIMIT_S):
                    from mcp import Client

                    streams = server.streams() if self._setup.command else over_http(self._setup.url, _token(self._setup))
                    client = await stack.enter_async_context(Client(streams))
                self.opened.set_result(client)
                await self.closing.wait()
        except BaseException as error:  # of a server, or of the library that reads its output
            if not self.opened.done():
                slow = f"it did not answer within {START_LIMIT_S:g} s"
                first = slow if isinstance(error, TimeoutError) else _reason(error)
                why = "; ".join([first, *server.errors])[: 3 * ERROR_CHARACTERS]
                self.opened.set_exception(ServerLost(f"the MCP server {named(self._setup)} cannot be used: {why}"))
                self.opened.exception()  # marks it as retrieved: perhaps nobody waits
            self.why = f": {_reason(error)}"
            if isinstance(error, asyncio.CancelledError):
                raise


def _token(setup: ProgramSetup) -> str:
    try:
        return read_token(setup.token) if setup.token else ""
    except ValueError as error:
        raise ServerLost(str(error)) from None


class McpTool:
    """A tool of a server, in one rollout."""

    def __init__(self, described: dict[str, Any], session: McpSession, limit_s: float) -> None:
        self.name, self.described = described["function"]["name"], described
        self._session, self._limit_s = session, limit_s

    async def call(self, arguments: object) -> str:
        """Return the tool's output, or the fault. Raises `ServerLost`."""
        if not isinstance(arguments, dict):
            return "Error: arguments must be an object"
        try:
            to_json(arguments)
        except ValueError as error:  # such as half a surrogate pair: no message can hold it, and the server would never see it
            return f"Error: {_reason(error)}"
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
                why = "; ".join(filter(None, [error.message, self._session.lost(client)]))
                raise ServerLost(f"the MCP server was lost during a call of {self.name!r}: {why}"[:ERROR_CHARACTERS]) from None
            return f"Error: {error.message}"[:ERROR_CHARACTERS]
        except Exception as error:  # an answer that the library rejects
            return f"Error: {_reason(error)}"


class McpToolSet:
    """The tools of a server, in one rollout."""

    def __init__(self, described: Sequence[dict[str, Any]], setup: ProgramSetup, shared: McpSession | None) -> None:
        self._session = shared or McpSession(setup)
        self._own = shared is None
        self.tools: Sequence[Callee] = [McpTool(each, self._session, setup.tool_limit_s) for each in described]

    def snapshot(self) -> Any:
        """Return an empty state if there is nothing to keep: the server is shared, or was not called yet."""
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
    for _ in range(MOST_TOOLS):
        page = await _page(session, client, cursor)
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


async def _page(session: McpSession, client: Any, cursor: str | None) -> Any:
    """Return a page of the server's list of tools. Raises `Unusable`."""
    from mcp import MCPError

    try:
        async with asyncio.timeout(START_LIMIT_S):
            return await client.list_tools(cursor=cursor)
    except TimeoutError:
        raise Unusable(f"the MCP server {session.name} did not list its tools within {START_LIMIT_S:g} s") from None
    except MCPError as error:
        told = f"{error.message}"[:ERROR_CHARACTERS]
        raise Unusable(f"the MCP server {session.name} answers the request for its tools with an error: {told}") from None
    except ValidationError as error:
        faults = error.errors(include_url=False)
        told = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in faults[:3])[:ERROR_CHARACTERS]
        raise Unusable(f"the MCP server {session.name} lists tools against the protocol: {told}") from None


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
    """Return the exception raised; of an exception group, the first."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS]
