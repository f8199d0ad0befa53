"""Listing an MCP server's tools: the messages about servers that respond incorrectly, late or never."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from services.environment.programs.frames import ProgramSetup
from services.environment.programs.loaded import BadReply
from services.environment.programs.mcp_tools import McpSession, McpTool, listed
from services.runtime.own_code import Unusable

SERVER = """
import json, sys, time
said = json.loads(sys.argv[1])
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    if asked["method"] == "initialize":
        offers = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}}}
        answer = {"result": offers | {"serverInfo": {"name": "raw", "version": "0"}}}
    elif asked["method"] in said:
        answer = said[asked["method"]]
    else:
        answer = {"error": {"code": -32601, "message": "no such method"}}
    if answer == "hang":
        time.sleep(600)
    if answer == "die":
        sys.exit("the disk is full")
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
"""
SCHEMA = {"type": "object", "properties": {}}


def session(**given: Any) -> McpSession:
    """Return a session with a server that, for each method, responds with an object, hangs or dies, as specified."""
    answers = {name.replace("_", "/"): answer for name, answer in given.items()}
    return McpSession(ProgramSetup("mcp", command=[sys.executable, "-c", SERVER, json.dumps(answers)]))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"result": {"tools": [{"name": "add"}]}}, "lists tools against the protocol: tools.0.inputSchema: Field required$"),
        ({"result": {"tools": "none"}}, "lists tools against the protocol: tools: Input should be a valid list$"),
        ({"error": {"code": -32000, "message": "no database"}}, "answers the request for its tools with an error: no database$"),
        ("hang", r"did not list its tools within 1\.5 s$"),
    ],
)
async def test_a_wrong_list_is_described_in_one_line(answer: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.environment.programs.mcp_tools.START_LIMIT_S", 60.0 if answer != "hang" else 1.5)
    one = session(tools_list=answer)
    try:
        await one.client()
        with pytest.raises(Unusable, match=f"(?s)^the MCP server .* {why}"):
            await listed(one)
    finally:
        await one.close()


async def test_a_server_that_does_not_answer_is_said_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.environment.programs.mcp_tools.START_LIMIT_S", 1.5)
    one = McpSession(ProgramSetup("mcp", command=[sys.executable, "-c", "import time; time.sleep(600)"]))
    try:
        with pytest.raises(BadReply, match=r"cannot be used: it did not answer within 1\.5 s$"):
            await one.client()
    finally:
        await one.close()


async def test_the_last_words_of_a_server_that_dies_are_passed_on() -> None:
    one = session(tools_call="die")
    tool = McpTool({"function": {"name": "add", "parameters": SCHEMA}}, one, 60.0)
    try:
        with pytest.raises(BadReply, match=r"was lost during a call of 'add': Connection closed; the disk is full$"):
            await tool.call({})
    finally:
        await one.close()
