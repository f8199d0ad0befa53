"""Chat messages of programs, brought into one form. Pure.

Guarantees: whatever `normalised` returns is JSON that templates can render; two messages have the same `canonical` form if and
only if they differ at most in what programs change as they pass a message back: identifiers of calls, the spelling of arguments,
the reasoning, and white space around what the assistant wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text")


class BadMessages(ValueError):
    """A conversation that cannot be rendered, for a reason that the caller can act on."""


def normalised(messages: object) -> list[dict[str, Any]]:
    """Return messages as templates expect them: contents as text, arguments of tool calls as objects. Raises `BadMessages`."""
    if not isinstance(messages, list) or not messages:
        raise BadMessages("messages must be a non-empty list")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(cast("list[object]", messages))]


def normalised_tools(tools: object) -> list[dict[str, Any]]:
    """Return the functions of `tools` in OpenAI's form. Raises `BadMessages`."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise BadMessages("tools must be a list")
    return [_tool(f"tools[{i}]", tool) for i, tool in enumerate(cast("list[object]", tools))]


def canonical(message: Mapping[str, Any]) -> bytes:
    """Return the key by which a normalised message is recognised."""
    own = message["role"] == "assistant"
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    content = message["content"].strip() if own else message["content"]
    return json.dumps([message["role"], content, calls], sort_keys=True).encode()


def text_of(where: str, content: object) -> str:
    """Return the text of a message's content, with each part on its own line. Raises `BadMessages`."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadMessages(f"{where}.content must be a string or a list of text parts")
    return "\n".join(_part(f"{where}.content[{i}]", part) for i, part in enumerate(cast("list[object]", content)))


def argument_object(text: object) -> object:
    """Return the arguments of a call, which are JSON in a string or an object already; anything else is returned unchanged."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text


def _part(where: str, part: object) -> str:
    if isinstance(part, str):
        return part
    fields = _object(where, part)
    text = fields.get("text")
    if fields.get("type") not in TEXT_PARTS or not isinstance(text, str):
        raise BadMessages(f"{where} has type {fields.get('type')!r}: the model reads text only")
    return text


def _message(where: str, message: object) -> dict[str, Any]:
    fields = _object(where, message)
    role = fields.get("role")
    if role not in ROLES:
        raise BadMessages(f"{where}.role = {role!r}: use one of {', '.join(ROLES)}")
    result: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": text_of(where, fields.get("content"))}
    if role == "assistant":
        reasoning = fields.get("reasoning_content")
        if isinstance(reasoning, str) and reasoning:
            result["reasoning_content"] = reasoning
        calls = fields.get("tool_calls")
        if calls:
            result["tool_calls"] = _calls(where, calls)
    result |= {key: fields[key] for key in ("name", "tool_call_id") if isinstance(fields.get(key), str)}
    return result


def _calls(where: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise BadMessages(f"{where}.tool_calls must be a list")
    result: list[dict[str, Any]] = []
    for i, call in enumerate(cast("list[object]", calls)):
        place = f"{where}.tool_calls[{i}]"
        fields = _object(place, call)
        function = _object(f"{place}.function", fields.get("function"))
        name = function.get("name")
        if not isinstance(name, str):
            raise BadMessages(f"{place}.function.name must be a string")
        identifier = fields.get("id")
        arguments = argument_object(function.get("arguments", {}))
        result.append(
            {
                **({"id": identifier} if isinstance(identifier, str) else {}),
                "type": "function",
                "function": {"name": name, "arguments": {} if arguments is None else arguments},
            }
        )
    return result


def _tool(where: str, tool: object) -> dict[str, Any]:
    fields = _object(where, tool)
    function = _object(f"{where}.function", fields.get("function"))
    if not isinstance(function.get("name"), str):
        raise BadMessages(f"{where}.function.name must be a string")
    kept = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
    return {"type": "function", "function": kept}


def _object(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadMessages(f"{where} must be an object")
    return cast("dict[str, Any]", value)
