"""Tool calls whose arguments are written one by one between tags: qwen3-coder and glm 4.5. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from services.chat.calls import Found, MalformedCall, ToolCall, arguments_of, as_typed, loads
from services.chat.json_calls import tagged
from services.chat.messages import schema_of

FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)
KEY, VALUE = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*", re.DOTALL), re.compile(r"<arg_value>(.*?)</arg_value>", re.DOTALL)


def qwen3_coder(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    """Find `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""
    outside, blocks = tagged(text, "<tool_call>", "</tool_call>")
    calls: list[ToolCall] = []
    for block in blocks:
        found = FUNCTION.fullmatch(block)
        if found is None:
            raise MalformedCall("a tool call must be <function=NAME>…</function>")
        name, body = found.groups()
        pairs, rest = _pairs(body)
        if rest.strip():
            raise MalformedCall(f"the call of {name} contains something other than <parameter=KEY>…</parameter>")
        calls.append(_call(name, [(key, _inner(value)) for key, value in pairs], tools))
    return Found(outside, calls)


def glm4(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    """Find `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`; arguments may be JSON, too."""
    outside, blocks = tagged(text, "<tool_call>", "</tool_call>")
    calls: list[ToolCall] = []
    for block in blocks:
        name = re.split(r"[\s{<]", block, maxsplit=1)[0]
        if not name:
            raise MalformedCall("a tool call must begin with the name of the tool")
        body = block[len(name) :].strip()
        if body.startswith("{"):
            calls.append(ToolCall(name, arguments_of(name, loads(body, f"the arguments of {name}"))))
            continue
        pairs, rest = _keys_and_values(body)
        if rest.strip():
            raise MalformedCall(f"the call of {name} contains something other than <arg_key>…</arg_key><arg_value>…</arg_value>")
        calls.append(_call(name, [(key.strip(), value) for key, value in pairs], tools))
    return Found(outside, calls)


def _pairs(body: str) -> tuple[list[tuple[str, str]], str]:
    """Return the parameters that `body` begins with, and the rest."""
    pairs: list[tuple[str, str]] = []
    end = 0
    while (found := PARAMETER.match(body, end)) is not None:
        pairs.append((found[1], found[2]))
        end = found.end()
    return pairs, body[end:]


def _keys_and_values(body: str) -> tuple[list[tuple[str, str]], str]:
    """Return the keys with their values that `body` begins with, and the rest."""
    pairs: list[tuple[str, str]] = []
    end = 0
    # two patterns: a single one would search for the value after every end of a key, which takes quadratic time
    while (key := KEY.match(body, end)) is not None and (value := VALUE.match(body, key.end())) is not None:
        pairs.append((key[1], value[1]))
        end = value.end()
    return pairs, body[end:]


def _inner(value: str) -> str:
    """Return a value without the line breaks that set it off from its tags."""
    return value.removeprefix("\n").removesuffix("\n")


def _call(name: str, pairs: Sequence[tuple[str, str]], tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    schema = schema_of(name, tools)
    return ToolCall(name, {key: as_typed(value, schema.get(key)) for key, value in pairs})
