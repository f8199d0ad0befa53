"""What all notations of tool calls have in common."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast


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


def loads(text: str, what: str) -> Any:
    """Return the value of JSON. Raises `MalformedCall`, also for NaN and infinity, which are not JSON."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise MalformedCall(f"{what} is not valid JSON: {error}") from None


def first_value(text: str, what: str) -> tuple[Any, str]:
    """Return the JSON value that `text` begins with, and the rest. Raises `MalformedCall`."""
    text = text.lstrip()
    try:
        value, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError) as error:
        raise MalformedCall(f"{what} is not valid JSON: {error}") from None
    return value, text[end:]


def call_of(value: object) -> ToolCall:
    """Return the call that an object with a name and arguments, or parameters, describes. Raises `MalformedCall`."""
    if not isinstance(value, dict):
        raise MalformedCall('a tool call must be a JSON object with "name" and "arguments"')
    fields = cast("dict[str, Any]", value)
    name = fields.get("name")
    if not isinstance(name, str) or not name:
        raise MalformedCall('a tool call has no "name", or it is not a string')
    name = name.encode("utf-8", "replace").decode()  # a lone surrogate cannot be passed on
    return ToolCall(name, arguments_of(name, fields.get("arguments", fields.get("parameters"))))


def arguments_of(name: str, value: object) -> dict[str, Any]:
    """Return the arguments of a call: an object, or JSON of one in a string. Raises `MalformedCall`."""
    if isinstance(value, str):
        value = loads(value, f"the arguments of {name}")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MalformedCall(f"the arguments of {name} must be a JSON object")
    return cast("dict[str, Any]", value)


def as_typed(text: str, schema: object) -> Any:
    """Convert an argument written as plain text to its schema's type: a string stays text, anything else is parsed as JSON."""
    kind = cast("dict[str, Any]", schema).get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return text
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number[:20]} is too large")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
