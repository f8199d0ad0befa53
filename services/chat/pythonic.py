"""Tool calls that are written as a list of Python calls: `[f(a=1), g(b="x")]`. Pure; nothing is executed."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from services.chat.calls import NO_VALUE, Found, MalformedCall, ToolCall, call, constant, expression, names

BEGINNING = re.compile(r"^[ \t]*(?:<\|python_start\|>\s*)?\[\s*([A-Za-z_][\w.]*)\s*\(", re.MULTILINE)


def pythonic(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    """Find a list of calls with constant keyword arguments, which begins a line and ends the text.

    Without an offered name at its beginning, only what Python reads as calls with named arguments is no prose.
    """
    begun = BEGINNING.search(text)
    if begun is None:
        return Found(text, [])
    body = text[begun.start() :].strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    offered = begun[1] in names(tools)
    try:
        tree = expression(body)
    except NO_VALUE as error:
        if not offered:
            return Found(text, [])
        raise MalformedCall(f"the tool calls are not a list of calls: {error}") from None
    nodes = tree.elts if isinstance(tree, ast.List) else []
    if not offered and not all(isinstance(node, ast.Call) and node.keywords for node in nodes):
        return Found(text, [])
    if not nodes:
        raise MalformedCall("the tool calls are not a list of calls")
    return Found(text[: begun.start()], [_call(node, tools) for node in nodes])


def _call(node: ast.expr, tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    if not isinstance(node, ast.Call):
        raise MalformedCall("the list contains something other than calls")
    name = _dotted(node.func)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise MalformedCall(f"the arguments of {name} must be named: {name}(key=value)")
    arguments = dict[str, Any]()
    for keyword in node.keywords:
        try:
            arguments[str(keyword.arg)] = constant(keyword.value)
        except NO_VALUE:  # whose texts contain addresses
            raise MalformedCall(f"the argument {keyword.arg} of {name} must be a constant that JSON has") from None
    return call(name, arguments, tools)


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise MalformedCall("the list contains a call without a name")
    return ".".join([node.id, *reversed(parts)])
