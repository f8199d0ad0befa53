"""Reads fields of request bodies, which are not trusted. Pure.

Guarantees: a value that cannot be served raises `RequestRefused` with the field, the value and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from services.environment.door.turns import Overrides, RequestRefused
from services.groups.generated import SamplingParameters

MOST_STOPS = 16
LONGEST_TOKENS = 1 << 31
SAMPLING = ("temperature", "top_p", "top_k")
FORCED = ("required", {"type": "any"})
"""Values by which OpenAI's and Anthropic's clients require a reply that calls some tool."""


def integer(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of these fields that is set, a positive integer; None if none is."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < LONGEST_TOKENS:
            raise RequestRefused(f"{name} = {shown(value)} must be an integer of at least 1")
        return value
    return None


def flag(body: Mapping[str, Any], name: str) -> bool:
    """Return a field that is true or false, by default false."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestRefused(f"{name} = {shown(value)} must be true or false")
    return bool(value)


def listed(body: Mapping[str, Any], name: str) -> list[Any]:
    """Return a field that is a list of objects, by default empty."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in cast("list[Any]", value)):
        raise RequestRefused(f"{name} must be a list of objects")
    return cast("list[Any]", value)


def text(body: Mapping[str, Any], name: str, where: str = "") -> str:
    """Return a field that must be a string."""
    value = body.get(name)
    if not isinstance(value, str):
        raise RequestRefused(f"{where}{name} = {shown(value)} must be a string")
    return value


def overrides(body: Mapping[str, Any], stop: str, *longest: str) -> Overrides:
    """Return the sampling parameters that a body sets: the field `stop` names its stop strings, `longest` its limit."""
    value: object = body.get(stop)
    given: object = [] if value is None else [value] if isinstance(value, str) else value
    strings = cast("list[str]", given) if isinstance(given, list) else [""]
    if not all(isinstance(string, str) and string for string in cast("list[object]", strings)):
        raise RequestRefused(f"{stop} = {shown(value)} must be a non-empty string or a list of them")
    if len(strings) > MOST_STOPS:
        raise RequestRefused(f"{stop} has {len(strings)} strings: give at most {MOST_STOPS}")
    return Overrides(integer(body, *longest), tuple(strings))


def refuse_unsupported(body: Mapping[str, Any], *supported: tuple[str, tuple[object, ...]]) -> None:
    """Refuse a field that is set to a value other than those listed for it."""
    for name, values in supported:
        value = body.get(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in values):
            raise RequestRefused(f"{name} = {shown(value)} is not supported here: leave it out", code="unsupported_value")


def overruled(body: Mapping[str, Any], sampling: SamplingParameters) -> str:
    """Return which sampling fields of a body are not honoured, and what is used instead; empty: none."""
    theirs = {name: body[name] for name in SAMPLING if isinstance(body.get(name), int | float)}
    ours = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    noted = [f"{name}={ours[name]}" for name, value in theirs.items() if value != ours[name]]
    if body.get("tool_choice") in FORCED:
        noted.append("tool_choice=auto")
    return ", ".join(noted)


def shown(value: object) -> str:
    """Return a value as it is quoted in an error: short, on one line, printable."""
    return ascii(value)[:60]
