"""What all notations of tool calls have in common: names that are offered, values by their JSON schemas, reasons for the model.

Guarantees: only an offered tool is called; the same text has the same reason in every run.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from jsonschema import Draft202012Validator, validators
from jsonschema.exceptions import UnknownType
from referencing.exceptions import Unresolvable

LONGEST = 64_000
"""Characters of Python that are parsed: its parser takes memory for every level of nesting."""
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
    quotes. Where the schema says nothing, only objects and lists are taken for more than text. Raises `MalformedCall`.
    """
    parameters = next((tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name), None)
    schema = cast("dict[str, Any]", parameters) if isinstance(parameters, dict) else {}
    known = schema.get("properties")
    known = cast("dict[str, Any]", known).get(key) if isinstance(known, dict) else None
    readings = list(_readings(text))
    large = next((value for value in readings if type(value) in (dict, list)), text)
    if not isinstance(known, dict) or not _SAYS & cast("dict[str, Any]", known).keys():
        return large
    kept = {part: schema[part] for part in ("properties", "$defs", "definitions") if part in schema}
    plain = [value for value in readings if not isinstance(value, str)]
    try:
        for check in (_Strict(kept), _Usual(kept)):
            for value in (*plain, text, *readings):
                if check.is_valid({key: value}):
                    return value
    except (UnknownType, Unresolvable, re.error, TypeError, RecursionError):
        return large  # the schema is not valid
    wanted = json.dumps(known, ensure_ascii=False, sort_keys=True)
    raise MalformedCall(f"the argument {key} of {name} is {_cut(text)!r}, which does not fit its schema {_cut(wanted)}")


def _readings(text: str) -> Iterator[Any]:
    """Yield the values that a text may stand for: of JSON, of Python, and whole numbers that are written otherwise."""
    text = text.strip()
    for read in (_DECODER.decode, _python):
        try:
            value: Any = read(text)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        yield value
        if isinstance(value, float) and value.is_integer():
            yield int(value)


def _python(text: str) -> Any:
    """Return the value of a Python literal that JSON has, too."""
    if len(text) > LONGEST:
        raise ValueError("the literal is too long")
    return json.loads(json.dumps(ast.literal_eval(text), allow_nan=False))


def _whole(_: object, value: object) -> bool:
    return type(value) is int


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
_SAYS = {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "not", "if", "properties", "items", "prefixItems"}
"""Keywords of a JSON schema that say what a value is."""
_Usual: Any = Draft202012Validator
_validators: Any = validators
_Strict: Any = _validators.extend(_Usual, type_checker=_Usual.TYPE_CHECKER.redefine("integer", _whole))
"""Takes 12.0 for no integer, so that a tool gets 12."""
