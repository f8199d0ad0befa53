"""Tool calls whose arguments are written one by one between tags: qwen3-coder and glm 4.5. Pure.

A value ends at its closing tag where another argument or the end of the call follows, so that a tag inside of a value ends
nothing. Nothing is unescaped: the notations only look like XML.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from services.chat.calls import Found, MalformedCall, ToolCall, arguments_of, call, expect, first_value, names, typed
from services.chat.json_calls import BEGIN, END, tagged, tagged_at

CALL = re.compile(r"<tool_call>|<function=[^>\s]+>")
FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=([^>\s]+)>")
BODY = re.compile(r"\s*(?:<parameter=|</function>)")
PARAMETER = re.compile(
    r"\s*<parameter=([^>\s]+)>(.*?)</parameter>"
    r"(?=\s*(?:<parameter=|</function>\s*(?:</tool_call>|(?=<tool_call>|<function=|\Z))"
    r"(?!(?:(?!<tool_call>|<function=).)*?</parameter>)))",  # which would be the end of a value that contains the end of a call
    re.DOTALL,
)
NAME = re.compile(r"\s*([^\s{<]+)")
KEY = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*", re.DOTALL)
VALUE = re.compile(
    r"<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|</tool_call>(?!(?:(?!<tool_call>|<arg_key>).)*?</arg_value>)))", re.DOTALL
)


def qwen3_coder(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    """Find `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

    Models of this family often leave out the first tag; without it, an offered name or a parameter begins a call.
    """
    content, calls, place = "", list[ToolCall](), 0
    while (begun := CALL.search(text, place)) is not None:
        opened = begun[0] == BEGIN
        if opened and text.find(END, begun.end()) < 0:
            raise MalformedCall(f"a tool call has no {END}")
        found = FUNCTION.match(text, begun.start())
        if found is None:
            raise MalformedCall("a tool call must be <function=NAME>…</function>")
        if not opened and found[1] not in names(tools) and BODY.match(text, found.end()) is None:
            content, place = content + text[place : found.end()], found.end()
            continue
        content += text[place : begun.start()]
        pairs, place = dict[str, str](), found.end()
        while (pair := PARAMETER.match(text, place)) is not None:
            pairs[pair[1]] = pair[2].removeprefix("\n").removesuffix("\n")  # which set a value off from its tags
            place = pair.end()
        rest = text[place:].lstrip()
        if not rest.startswith("</function>"):
            raise MalformedCall(f"the call of {found[1]} contains something other than <parameter=KEY>…</parameter>")
        rest = rest.removeprefix("</function>").lstrip()
        rest = expect(END, rest, "a tool call") if opened else rest.removeprefix(END)
        calls.append(_call(found[1], pairs, tools))
        place = len(text) - len(rest)
    return Found(content + text[place:], calls)


def glm4(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    """Find `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`; arguments may be JSON, too."""
    if BEGIN not in text:
        untagged = re.search(rf"^[ \t]*(?:{'|'.join(map(re.escape, names(tools)))})\s*<arg_key>", text, re.MULTILINE)
        text = tagged_at(untagged.start() if untagged else -1, text, BEGIN)

    def read(body: str) -> tuple[ToolCall, str]:
        found = NAME.match(body)
        if found is None:
            raise MalformedCall("a tool call must begin with the name of the tool")
        name, body = found[1], body[found.end() :].lstrip()
        if body.startswith("{"):
            value, rest = first_value(body, f"the arguments of {name}")
            return call(name, arguments_of(name, value), tools), rest
        pairs, place = dict[str, str](), 0
        # two patterns: a single one would search for the value after every end of a key, which takes quadratic time
        while (key := KEY.match(body, place)) is not None and (value := VALUE.match(body, key.end())) is not None:
            pairs[key[1].strip()], place = value[1], value.end()
        if not (rest := body[place:].lstrip()).startswith(END):
            raise MalformedCall(f"the call of {name} contains something other than <arg_key>…</arg_key><arg_value>…</arg_value>")
        return _call(name, pairs, tools), rest

    return tagged(text, read)


def _call(name: str, pairs: Mapping[str, str], tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    made = call(name, {}, tools)
    made.arguments.update({key: typed(name, key, value, tools) for key, value in pairs.items()})
    return made
