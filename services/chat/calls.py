"""What all notations of tool calls have in common: names that are offered, values by their JSON schemas, reasons for the model.

Guarantees: only an offered tool is called; the same text has the same reason in every run.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from jsonschema import Draft202012Validator, validators
from jsonschema.exceptions import UnknownType
from referencing.exceptions import Unresolvable
from referencing.jsonschema import EMPTY_REGISTRY

LONGEST = 64_000
"""Characters of Python that are parsed: its parser takes memory for every level of nesting."""
NO_VALUE = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)
"""What reading a text as JSON or as Python raises if it is neither."""
SHOWN = 60
"""Characters of a value or a schema that a reason repeats."""


class MalformedCall(ValueError):
    """The model began a tool call that is malformed. The text is the answer to the model."""


class ToolCall(NamedTuple):
    """A call of a tool by the model."""

    name: str
    arguments: dict[str, Any]


class Found(NamedTuple):
    """The model's text besides its calls, and the calls."""

    content: str
    calls: list[ToolCall]


Parser = Callable[[str, Sequence[Mapping[str, Any]]], Found]
"""(text, normalised tools) -> what was found. Raises `MalformedCall`."""


def first_value(text: str, what: str) -> tuple[Any, str]:
    """Return the JSON value that `text` begins with, and the rest. Raises `MalformedCall`, also for NaN and infinity."""
    text = text.lstrip()
    try:
        value, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError) as error:
        raise MalformedCall(f"{what} is not valid JSON: {error}") from None
    return value, text[end:]


def expect(tag: str, text: str, what: str) -> str:
    """Return what follows a tag, which `text` begins with. Raises `MalformedCall`."""
    text = text.lstrip()
    if not text.startswith(tag):
        raise MalformedCall(f"{what} ends with {text[:20]!r} instead of {tag}")
    return text[len(tag) :]


def names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the tools that are offered."""
    return [tool["function"]["name"] for tool in tools]


def call(name: str, arguments: dict[str, Any], tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    """Return a call of an offered tool. Raises `MalformedCall` for another name."""
    if name not in names(tools):
        shown = name.encode("utf-8", "replace").decode()[:40]  # a lone surrogate cannot be passed on
        raise MalformedCall(f"there is no tool {shown!r}: the tools are {', '.join(names(tools))}")
    return ToolCall(name, arguments)


def call_of(value: object, tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    """Return the call that an object with a name and arguments, or parameters, describes. Raises `MalformedCall`."""
    if not isinstance(value, dict):
        raise MalformedCall('a tool call must be a JSON object with "name" and "arguments"')
    fields = cast("dict[str, Any]", value)
    name = fields.get("name")
    if not isinstance(name, str) or not name:
        raise MalformedCall('a tool call has no "name", or it is not a string')
    return call(name, arguments_of(name, fields.get("arguments", fields.get("parameters"))), tools)


def arguments_of(name: str, value: object) -> dict[str, Any]:
    """Return the arguments of a call: an object, or JSON of one in a string. Raises `MalformedCall`."""
    if isinstance(value, str):
        value, rest = first_value(value, f"the arguments of {name}")
        if rest.strip():
            raise MalformedCall(f"the arguments of {name} are followed by {rest.strip()[:20]!r}")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MalformedCall(f"the arguments of {name} must be a JSON object")
    return cast("dict[str, Any]", value)


def typed(name: str, key: str, text: str, tools: Sequence[Mapping[str, Any]]) -> Any:
    """Return the value of an argument that is written as plain text: its first reading that fits the tool's JSON schema.

    A number, boolean, null, object or list comes first, as JSON and as Python write them, then the text itself, then a string in
    quotes. Where the schema states no type, only objects and lists are taken for more than text. Raises `MalformedCall`.
    """
    parameters = next((tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name), None)
    schema = cast("dict[str, Any]", parameters) if isinstance(parameters, dict) else {}
    readings = list(_readings(text))
    large = [value for value in readings if type(value) in (dict, list)] if text.lstrip()[:1] in ("{", "[") else []
    check = _Strict(schema, registry=EMPTY_REGISTRY)  # which downloads no schemas from elsewhere
    try:
        if _fits(check, key, _UNTYPED):
            fitting = [value for value in (*large, text) if _fits(check, key, value)]
        else:
            plain = [value for value in readings if not isinstance(value, str)]
            fitting = [value for value in (*plain, text, *readings) if _fits(check, key, value)]
    except (UnknownType, Unresolvable, re.error, TypeError, AttributeError, LookupError, ValueError, RecursionError):
        return [*large, text][0]  # the schema is not valid
    if fitting:
        return fitting[0]
    stated = schema.get("properties")
    stated = json.dumps(stated[key], ensure_ascii=False, sort_keys=True) if isinstance(stated, dict) and key in stated else ""
    raise MalformedCall(f"the argument {key} of {name} is {_cut(text)!r}, which does not fit its schema {_cut(stated)}".rstrip())


def _fits(check: Any, key: str, value: object) -> bool:
    """Return whether a schema of all arguments takes this one, whatever it says about others."""
    return not any(_concerns(error, key) for error in check.iter_errors({key: value}))


def _concerns(error: Any, key: str) -> bool:
    """Return whether an error is about the value of `key`: of alternatives, each must have one that is."""
    if error.absolute_path:
        return error.absolute_path[0] == key
    alternatives = dict[object, bool]()
    for each in error.context:
        branch = each.schema_path[0]
        alternatives[branch] = alternatives.get(branch, False) or _concerns(each, key)
    return bool(alternatives) and all(alternatives.values())


def _readings(text: str) -> Iterator[Any]:
    """Yield the values that a text may stand for: of JSON, of Python, and with whole numbers that are written otherwise."""
    text = text.strip()
    for read in (_DECODER.decode, _python):
        try:
            value: Any = read(text)
        except NO_VALUE:
            continue
        if isinstance(value, list) and text[0] not in "[(":
            continue  # 1,000 is no pair
        yield value
        yield _whole(value)


def _whole(value: Any) -> Any:
    """Return a value with integers for the floats in it that are whole numbers."""
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_whole(each) for each in cast("list[Any]", value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_integer(_: object, value: object) -> bool:
    return type(value) is int


def expression(text: str) -> ast.expr:
    """Return the tree of a Python expression. Raises one of `NO_VALUE`."""
    if len(text) > LONGEST:
        raise ValueError(f"more than {LONGEST} characters")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in the model's strings
        return ast.parse(text, mode="eval").body


def constant(node: ast.expr) -> Any:
    """Return the value of a Python literal, or of JSON's `true`, `false` and `null`, as JSON has it. Raises one of `NO_VALUE`."""
    return json.loads(json.dumps(ast.literal_eval(_Constants().visit(node)), allow_nan=False))


def _python(text: str) -> Any:
    return constant(expression(text))


class _Constants(ast.NodeTransformer):
    """Reads the constants of JSON as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_OF_JSON[node.id]) if node.id in _OF_JSON else node


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number[:20]} is too large")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
_OF_JSON = {"true": True, "false": False, "null": None}
_UNTYPED = object()
"""A value of no type of JSON: a schema that takes it states no type."""
_Usual: Any = Draft202012Validator
_validators: Any = validators
_Strict: Any = _validators.extend(_Usual, type_checker=_Usual.TYPE_CHECKER.redefine("integer", _is_integer))
"""Takes 12.0 for no integer, so that a tool gets 12."""
