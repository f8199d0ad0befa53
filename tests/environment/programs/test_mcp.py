"""MCP servers as environments: real server processes, called by a real worker."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest

from services.config import ConfigError
from services.config.environments import McpEnvironment
from services.environment.programs.frames import ProgramSetup
from services.environment.programs.mcp_tools import McpSession, ServerLost
from services.environment.programs.mcp_transport import _CarefulClient
from services.environment.programs.pool import ProgramPool
from services.environment.programs.process import ProgramFailed, ProgramProcess, ProgramUnusable
from services.runtime.process_tools import free_port
from tests.support.harness import save_tokenizer_folder, small_config, wait_until

SERVER = [sys.executable, str(Path(__file__).parents[1] / "support" / "mcp_server.py")]


@asynccontextmanager
async def worker(**keys: Any) -> AsyncIterator[ProgramProcess]:
    pool = ProgramPool(McpEnvironment(name="m", kind="mcp", **keys))
    try:
        await pool.start()
        async with pool.process() as one:
            yield one
    finally:
        await pool.close()


async def say(process: ProgramProcess, rollout: str, tool: str, **arguments: Any) -> tuple[str, Any]:
    """Call a tool; return its output and the snapshot afterwards."""
    call = {"id": "1", "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
    done = await process.do(rollout, "turn", {"content": "", "tool_calls": [call]})
    [message] = done.value["messages"]
    assert (message["role"], message["tool_call_id"], message["name"]) == ("tool", "1", tool)
    return message["content"], done.value["snapshot"]


def servers() -> list[int]:
    """Return the process ids of all running test servers."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            if SERVER[1].encode() in (proc / "cmdline").read_bytes().split(b"\0"):
                found.append(int(proc.name))
        except OSError:
            continue
    return found


async def test_every_rollout_has_its_own_robust_server() -> None:
    async with worker(server=SERVER, timeout_s=60.0) as process:
        started = (await process.do("a", "start", {})).value
        await process.do("b", "start", {})
        names = [tool["function"]["name"] for tool in started["tools"]]
        assert names == ["count", "fail", "wait", "flood", "die", "babble"]
        assert started["tools"][0]["function"]["parameters"]["properties"]["by"]["type"] == "integer"
        assert started["snapshot"] is not None, "another pod can still repeat everything so far"
        assert await say(process, "a", "count", by=2) == ("2", None)
        assert (await say(process, "a", "count"))[0] == "3"
        assert (await say(process, "b", "count"))[0] == "1"
        assert (await say(process, "a", "count", by="many"))[0].startswith("Error")
        for by in ("\ud800", functools.reduce(lambda inner, _: [inner], range(300), list[Any]())):
            output, _ = await say(process, "a", "count", by=by)
            assert output.startswith("Error: "), "the output fits into no message"
            assert "took longer" not in output
        assert (await say(process, "a", "fail", text="on purpose"))[0].startswith("Error executing tool fail")
        assert (await say(process, "a", "wait", seconds=60))[0] == "Error: the tool took longer than 3 s"
        flood, _ = await say(process, "a", "flood", characters=1_000_000)
        assert len(flood) == 200_000
        assert flood.endswith("(1000000 characters, truncated)")
        assert (await say(process, "a", "babble"))[0] == "said"
        assert (await say(process, "a", "absent"))[0].startswith("Error: there is no tool 'absent'")
        with pytest.raises(ProgramFailed, match="the MCP server was lost during a call of 'die'"):
            await say(process, "a", "die")
        assert (await say(process, "b", "count"))[0] == "2", "another rollout's server keeps running"
        assert (await process.do("b", "turn", {"content": "done"})).value["messages"] is None
        assert (await process.do("b", "score")).value is None
        process.drop("a")
        process.drop("b")
        await wait_until(lambda: not servers())


async def test_a_server_at_a_url_can_be_shared_and_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    server = serving(port)
    try:
        await wait_until(lambda: _answers(port))
        monkeypatch.setenv("TESTS_TOKEN", "secret")
        async with worker(server=f"http://127.0.0.1:{port}/mcp", shared=True, token="env:TESTS_TOKEN") as process:
            for rollout in ("a", "b"):
                await process.do(rollout, "start", {})
            assert (await say(process, "a", "count"))[0] == "1"
            output, snapshot = await say(process, "b", "count")
            assert (output, snapshot) == ("2", {"own": None, "sets": [{}]})
            await process.do("c", "restore", snapshot)
            assert (await say(process, "c", "count"))[0] == "3"
            server.kill()
            server.wait()
            for rollout, why in (("a", "was lost"), ("b", "cannot be used")):
                with pytest.raises(ProgramFailed, match=why):
                    await say(process, rollout, "count")
            server = serving(port)
            await wait_until(lambda: _answers(port))
            assert (await say(process, "c", "count"))[0] == "1", "rollouts find the replacement server"
    finally:
        server.kill()
        server.wait()


async def test_a_shared_server_that_dies_is_restarted() -> None:
    async with worker(server=SERVER, shared=True) as process:
        for rollout in ("a", "b"):
            await process.do(rollout, "start", {})
        with pytest.raises(ProgramFailed, match="was lost during a call of 'die'"):
            await say(process, "a", "die")
        assert (await say(process, "b", "count"))[0] == "1"


async def test_a_lost_connection_is_not_reported_as_a_tool_error() -> None:
    session = McpSession(ProgramSetup("mcp", command=SERVER))
    try:
        session.lost(await session.client())
        with pytest.raises(ServerLost, match=r"the connection to the MCP server .*mcp_server\.py' has ended"):
            await session.client()
    finally:
        await session.close()


async def _endless() -> AsyncIterator[bytes]:
    while True:
        yield b"x" * (1 << 20)


@pytest.mark.parametrize(
    ("response", "why"),
    [
        (httpx2.Response(200, content=_endless()), "more than 16 MiB"),
        (httpx2.Response(200, content=gzip.compress(b"{}"), headers={"content-encoding": "gzip"}), "compresses its answers"),
        (httpx2.Response(503, json={}), "status 503"),
        (httpx2.Response(404, json={"error": "no such session"}), "status 404"),
        (httpx2.Response(400, text="<html>"), "status 400"),
        (httpx2.Response(400, json={"error": "wrong arguments"}), ""),
        (httpx2.Response(200, json={"result": 1}), ""),
    ],
    ids=lambda given: f"{given.status_code}" if isinstance(given, httpx2.Response) else given,
)
async def test_an_invalid_http_response_ends_the_connection(response: httpx2.Response, why: str) -> None:
    async with _CarefulClient(transport=httpx2.MockTransport(lambda _: response)) as client:
        with pytest.raises(httpx2.TransportError, match=why) if why else contextlib.nullcontext():
            await client.post("http://server/mcp", headers={"mcp-session-id": "1"}, json={})


def serving(port: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*SERVER, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/mcp").status_code > 0
    except httpx.TransportError:
        return False


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"server": [sys.executable, "-c", "import sys; sys.exit('no such database')"]}, "no such database"),
        ({"server": ["/nowhere/server"]}, "'/nowhere/server' cannot be used: FileNotFoundError"),
        ({"server": "http://127.0.0.1:9/mcp"}, "'http://127.0.0.1:9/mcp' cannot be used"),
        (
            {"server": "http://127.0.0.1:9/mcp", "token": "env:UNSET_TOKEN"},
            "token = env:UNSET_TOKEN: the environment variable",
        ),
        (
            {"server": "http://x/mcp", "interpreter": "/nowhere/python"},
            "cannot be run .*No such file or directory.*: make it with",
        ),
    ],
)
async def test_an_unusable_server_is_named_with_the_reason(keys: dict[str, Any], expected: str) -> None:
    pool = ProgramPool(McpEnvironment(name="m", kind="mcp", **keys))
    with pytest.raises(ProgramUnusable, match=expected):
        await pool.start()
    await pool.close()
    assert "UNSET_TOKEN" not in os.environ


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('kind = "mcp"', "missing required key"),
        ('kind = "mcp", server = "tools:8000"', "must begin with http:// or https://"),
        ('kind = "mcp", server = "http://u:p@h/mcp"', "contains a user name or password: remove them; token"),
        ('kind = "mcp", server = ["x"], token = "env:T"', "token has no effect with a server that is a program"),
        ('kind = "mcp", server = ["x"]', "has no function, and no verifier scores source"),
        ('kind = "python"', 'needs function, a class, or tools = \\["python"\\]'),
    ],
)
def test_configuration_errors_are_named(table: str, said: str, tmp_path: Path) -> None:
    save_tokenizer_folder(tmp_path / "model")
    source = f'{{kind = "jsonl", path = "{tmp_path / "data.jsonl"}", environment = "world"}}'
    with pytest.raises(ConfigError, match=said):
        small_config(tmp_path, None, f"data.sources=[{source}]", "verifiers=[]", f'environments=[{{name = "world", {table}}}]')
