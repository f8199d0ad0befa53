"""Tool calls that are written as a list of Python calls: `[f(a=1), g(b="x")]`. Pure; nothing is executed."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from services.chat.calls import LONGEST, Found, MalformedCall, ToolCall, call, names

BEGINNING = re.compile(r"(?:<\|python_start\|>\s*)?\[\s*([A-Za-z_][\w.]*)\s*\(")
OF_JSON = {"true": True, "false": False, "null": None}
"""Constants that models write as in JSON."""


def pythonic(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    """Find a list of calls with constant keyword arguments, which is the whole text and begins with an offered tool."""
    body = text.strip()
    begun = BEGINNING.match(body)
    if begun is None or begun[1] not in names(tools):
        return Found(text, [])
    body = body.removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    if len(body) > LONGEST:
        raise MalformedCall(f"the tool calls have more than {LONGEST} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in the model's strings
            tree = ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedCall(f"the tool calls are not a list of calls: {error}") from None
    if not isinstance(tree, ast.List):
        raise MalformedCall("the tool calls are not a list of calls")
    return Found("", [_call(node, tools) for node in tree.elts])


def _call(node: ast.expr, tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    if not isinstance(node, ast.Call):
        raise MalformedCall("the list contains something other than calls")
    name = _dotted(node.func)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise MalformedCall(f"the arguments of {name} must be named: {name}(key=value)")
    arguments = dict[str, Any]()
    for keyword in node.keywords:
        try:
            arguments[str(keyword.arg)] = ast.literal_eval(_Constants().visit(keyword.value))
            json.dumps(arguments, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # whose texts contain addresses
            raise MalformedCall(f"the argument {keyword.arg} of {name} must be a constant that JSON has") from None
    return call(name, arguments, tools)


class _Constants(ast.NodeTransformer):
    """Reads the constants of JSON as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(OF_JSON[node.id]) if node.id in OF_JSON else node


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise MalformedCall("the list contains a call without a name")
    return ".".join([node.id, *reversed(parts)])
