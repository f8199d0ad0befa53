"""Tool calls that are JSON: hermes and qwen, llama 3, mistral, deepseek, older glm 4. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from services.chat.calls import Found, MalformedCall, ToolCall, arguments_of, call_of, first_value, loads

BEGIN_CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN_CALL, SEPARATOR, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MISTRAL = "[TOOL_CALLS]"
PYTHON_TAG = "<|python_tag|>"


def tagged(text: str, begin: str, end: str) -> tuple[str, list[str]]:
    """Return the text outside of blocks from `begin` to `end`, and the blocks. Raises `MalformedCall` if a block has no end."""
    outside, *blocks = text.split(begin)
    inside: list[str] = []
    for block in blocks:
        body, closed, after = block.partition(end)
        if not closed:
            raise MalformedCall(f"a tool call has no {end}")
        inside.append(body.strip())
        outside += after
    return outside, inside


def hermes(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    """Find `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""
    outside, blocks = tagged(text, "<tool_call>", "</tool_call>")
    return Found(outside, [call_of(loads(block, "a tool call")) for block in blocks])


def llama3(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    """Find `{"name": …, "parameters": {…}}`, several separated by `;`, after `<|python_tag|>` or as the whole text."""
    before, tag, body = text.partition(PYTHON_TAG)
    if not tag:
        before, body = "", text
        if not re.match(r'\s*\{\s*"(name|type|parameters|arguments)"', text):
            return Found(text, [])
    calls: list[ToolCall] = []
    while body.strip():
        value, body = first_value(body, "a tool call")
        calls.append(call_of(_function(value)))
        body = body.lstrip().removeprefix(";").lstrip().removeprefix(PYTHON_TAG)
    if tag and not calls:
        raise MalformedCall(f"nothing follows {PYTHON_TAG}")
    return Found(before, calls)


def _function(value: object) -> object:
    if isinstance(value, dict) and isinstance(inner := cast("dict[str, Any]", value).get("function"), dict):
        return cast("dict[str, Any]", inner)
    return cast("object", value)


def mistral(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    """Find `[TOOL_CALLS][{…}, …]` of older models, and `[TOOL_CALLS]name{…}` or `[TOOL_CALLS]name[ARGS]{…}` of newer ones."""
    before, *blocks = text.split(MISTRAL)
    calls: list[ToolCall] = []
    for block in blocks:
        body = block.strip()
        if body.startswith("["):
            value, rest = first_value(body, "the list of tool calls")
            if not isinstance(value, list):
                raise MalformedCall(f"{MISTRAL} must be followed by a list")
            calls += [call_of(entry) for entry in cast("list[object]", value)]
        else:
            name = re.split(r"\[|\{", body, maxsplit=1)[0].strip()
            if not name:
                raise MalformedCall(f"{MISTRAL} must be followed by the name of a tool")
            arguments = body[body.index(name) + len(name) :].strip()
            _, marked, after = arguments.partition("[ARGS]")
            value, rest = first_value(after if marked else arguments, f"the arguments of {name}")
            calls.append(ToolCall(name, arguments_of(name, value)))
        if rest.strip():
            raise MalformedCall(f"text follows the tool calls: {rest.strip()[:40]!r}")
    return Found(before, calls)


def deepseek(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    """Find the calls of DeepSeek V3 and R1, in a code block after the name, and of V3.1, which are the arguments alone."""
    before, begun, body = text.partition(BEGIN_CALLS)
    if not begun:
        return Found(text, [])
    body, _, after = body.partition(END_CALLS)
    _, blocks = tagged(body, BEGIN_CALL, END_CALL)
    if not blocks:
        raise MalformedCall(f"{BEGIN_CALLS} is followed by no call")
    return Found(before + after, [_deepseek_call(block) for block in blocks])


def _deepseek_call(block: str) -> ToolCall:
    first, separated, rest = block.partition(SEPARATOR)
    if not separated:
        raise MalformedCall(f"a tool call has no {SEPARATOR}")
    name, fence, code = rest.partition("```json")
    if fence:
        name, arguments = name.strip(), code.strip().removesuffix("```")
    else:
        name, arguments = first.strip(), rest
    if not name:
        raise MalformedCall("a tool call has no name")
    return ToolCall(name, arguments_of(name, loads(arguments.strip() or "{}", f"the arguments of {name}")))
