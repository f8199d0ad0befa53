"""Tool calls that are JSON: hermes and qwen, llama 3, mistral, deepseek, older glm 4. Pure.

A JSON value is read to its end before the tag after it is looked for, so that a tag inside of a string ends nothing. A first tag
that a model left out is put back where what follows is certainly meant as a call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from services.chat.calls import Found, MalformedCall, ToolCall, arguments_of, call, call_of, expect, first_value, names

BEGIN, END = "<tool_call>", "</tool_call>"
BEGIN_CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN_CALL, SEPARATOR, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MISTRAL, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
PYTHON_TAG = "<|python_tag|>"
OBJECT = re.compile(r'\{\s*"(?:name|type|function|parameters|arguments|id)"\s*:')
FIELDS = {"name", "type", "function", "parameters", "arguments", "id"}
MOST_OBJECTS = 8
"""Objects in a text without a tag that are looked at: each may take as long as the text."""


def hermes(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    """Find `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""
    if BEGIN not in text and END in text:
        text = tagged_at(_untagged(text, tools), text, BEGIN)

    def read(body: str) -> tuple[ToolCall, str]:
        value, rest = first_value(body, "a tool call")
        return call_of(value, tools), rest

    return tagged(text, read)


def tagged(text: str, read: Callable[[str], tuple[ToolCall, str]]) -> Found:
    """Find calls between `<tool_call>` and `</tool_call>`; `read` returns the call that a text begins with, and the rest."""
    content, calls = "", list[ToolCall]()
    while True:
        before, begun, text = text.partition(BEGIN)
        content += before
        if not begun:
            return Found(content, calls)
        if END not in text:
            raise MalformedCall(f"a tool call has no {END}")
        made, rest = read(text)
        calls.append(made)
        text = expect(END, rest, "a tool call")


def tagged_at(begin: int, text: str, tag: str) -> str:
    """Return a text with a tag put where a call begins; a negative number stands for no place."""
    return text if begin < 0 else text[:begin] + tag + text[begin:]


def llama3(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    """Find `{"name": …, "parameters": {…}}`, several separated by `;`, after `<|python_tag|>` or after text without a tag."""
    before, tag, body = text.partition(PYTHON_TAG)
    if not tag:
        begin = _untagged(text, tools)
        if begin < 0:
            return Found(text, [])
        before, body = text[:begin], text[begin:]
    calls: list[ToolCall] = []
    while body.strip():
        value, body = first_value(body, "a tool call")
        calls.append(call_of(_function(value), tools))
        body = body.lstrip().removeprefix(";").lstrip().removeprefix(PYTHON_TAG)
    if not calls:
        raise MalformedCall(f"nothing follows {PYTHON_TAG}")
    return Found(before, calls)


def _untagged(text: str, tools: Sequence[Mapping[str, Any]]) -> int:
    """Return where the first object begins that is meant as a call: an offered name, or a name and arguments; -1 if none is."""
    offered = "|".join(map(re.escape, names(tools)))
    meant = re.compile(rf'"name"\s*:\s*"(?:{offered})"')
    begin = 0
    for _ in range(MOST_OBJECTS):
        if (found := OBJECT.search(text, begin)) is None:
            return -1
        try:
            value, rest = first_value(text[found.start() :], "")
        except MalformedCall:
            if meant.search(text, found.start()):
                return found.start()
            begin = found.end()
            continue
        fields = _function(value)
        given = isinstance(fields.get("name"), str) and isinstance(fields.get("arguments", fields.get("parameters")), dict)
        if (given or fields.get("name") in names(tools)) and fields.keys() <= FIELDS:
            return found.start()
        begin = len(text) - len(rest)
    return -1


def _function(value: object) -> dict[str, Any]:
    """Return the object itself or the one that it has as "function"; empty for another value."""
    fields = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    inner = fields.get("function")
    return cast("dict[str, Any]", inner) if isinstance(inner, dict) else fields


def mistral(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    """Find `[TOOL_CALLS][{…}, …]` of older models, and `[TOOL_CALLS]name{…}` or `[TOOL_CALLS]name[ARGS]{…}` of newer ones."""
    if MISTRAL not in text and (begin := _untagged(text, tools)) >= 0:
        opened = text[:begin].rstrip()
        text = tagged_at(len(opened) - 1 if opened.endswith("[") else begin, text, MISTRAL)
    before, marked, body = text.partition(MISTRAL)
    calls: list[ToolCall] = []
    while marked:
        body = body.lstrip()
        if body.startswith(("[", "{")):
            value, rest = first_value(body, "the list of tool calls")
            calls += [call_of(entry, tools) for entry in (cast("list[object]", value) if isinstance(value, list) else [value])]
        else:
            name = re.split(r"\[|\{", body, maxsplit=1)[0]
            rest = body[len(name) :]
            if not (name := name.strip()):
                raise MalformedCall(f"{MISTRAL} must be followed by the name of a tool")
            if rest.startswith(CALL_ID):
                rest = rest[len(CALL_ID) + len(re.split(r"\[|\{", rest[len(CALL_ID) :], maxsplit=1)[0]) :]
            value, rest = first_value(rest.removeprefix(ARGUMENTS), f"the arguments of {name}")
            calls.append(call(name, arguments_of(name, value), tools))
        rest = rest.lstrip()
        if rest and not rest.startswith(MISTRAL):
            raise MalformedCall(f"text follows the tool calls: {rest.strip()[:40]!r}")
        _, marked, body = rest.partition(MISTRAL)
    return Found(before, calls)


def deepseek(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    """Find the calls of DeepSeek V3 and R1, in a code block after the name, and of V3.1, which are the arguments alone."""
    if BEGIN_CALLS not in text:
        text = tagged_at(text.find(BEGIN_CALL), text, BEGIN_CALLS)
    before, begun, body = text.partition(BEGIN_CALLS)
    if not begun:
        return Found(text, [])
    calls: list[ToolCall] = []
    while (body := body.lstrip()).startswith(BEGIN_CALL):
        first, separated, rest = body[len(BEGIN_CALL) :].partition(SEPARATOR)
        if not separated:
            raise MalformedCall(f"a tool call has no {SEPARATOR}")
        name, code = first.strip(), rest.lstrip()
        if not code.startswith(("{", END_CALL)):
            name, fence, code = rest.partition("```json")
            if not fence:
                raise MalformedCall("the arguments of a tool call are no JSON object")
            name = name.strip()
        if not name:
            raise MalformedCall("a tool call has no name")
        value: object = None
        if not code.startswith(END_CALL):
            value, code = first_value(code, f"the arguments of {name}")
        calls.append(call(name, arguments_of(name, value), tools))
        body = expect(END_CALL, code.lstrip().removeprefix("```"), "a tool call")
    if not calls:
        raise MalformedCall(f"{BEGIN_CALLS} is followed by no call")
    return Found(before + body.removeprefix(END_CALLS), calls)
