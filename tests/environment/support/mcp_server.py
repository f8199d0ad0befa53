"""An MCP server for tests, built with the official library, whose tools keep state, hang, die or flood."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("tests", log_level="CRITICAL")  # logging tracebacks takes seconds
counted = 0


@server.tool()
def count(by: int = 1) -> str:
    """Add to the counter."""
    global counted
    counted += by
    return f"{counted}"


@server.tool()
def fail(text: str) -> str:
    """Raise an error."""
    raise ValueError(text)


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "done"


@server.tool()
def flood(characters: int) -> str:
    """Return a long text."""
    return "x" * characters


@server.tool()
def die() -> str:
    """Kill the server in the middle of a call."""
    os._exit(7)


@server.tool()
def babble() -> str:
    """Print a line that is not a message."""
    print("no message \xff", flush=True)
    return "said"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport="streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
