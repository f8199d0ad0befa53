"""Reads fields of request bodies, which are not trusted. Pure.

Guarantees: a value that cannot be served raises `RequestRefused` with the field, the value and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any, cast

from services.environment.door.turns import Overrides, RequestRefused
from services.groups.generated import SamplingParameters

MOST_STOPS = 16
LONGEST_TOKENS = 1 << 31
SAMPLING = ("temperature", "top_p", "top_k")
FREE = ("auto", "none", {"type": "auto"}, {"type": "none"})
"""Values of `tool_choice` that leave the choice to the policy. Others are hints: what the policy says is its own."""
HARMLESS = {
    "model",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    *SAMPLING,
    "tool_choice",
}
"""Fields of all dialects that change no reply, or that `overruled` names."""
NEUTRAL: dict[str, object] = {
    "response_format": {"type": "text"}, "text": {"format": {"type": "text"}}, "parallel_tool_calls": True, "logit_bias": {},
    "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "min_p": 0, "min_tokens": 0, "ignore_eos": False,
    "thinking": {"type": "disabled"}, "truncation": "disabled",
}  # fmt: skip
"""Values at which a field asks for nothing."""
UNANSWERABLE: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("audio", ()), ("prompt_logprobs", (0,)), ("echo", (False,)), ("add_generation_prompt", (True,)), ("stop_token_ids", ([],)),
    ("continue_final_message", (False,)), ("chat_template_kwargs", ({},)), ("chat_template", ()), ("documents", ([],)),
    ("use_beam_search", (False,)), ("best_of", (1,)), ("suffix", ("",)),
)  # fmt: skip
"""Fields of all dialects that cannot be answered, unless they have one of these values."""
MOST_NAMED = 16


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
    """Refuse a field that is set to a value other than those listed for it, here or for all dialects."""
    for name, values in (*supported, *UNANSWERABLE):
        value = body.get(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in values):
            raise RequestRefused(f"{name} = {shown(value)} is not supported here: leave it out", code="unsupported_value")


def ignored(body: Mapping[str, Any], honoured: Collection[str]) -> tuple[str, ...]:
    """Return the fields that are taken as hints and not enforced: all but those that are `honoured` or ask for nothing.

    Enforcing a grammar or a penalty in the engine would make its logprobs those of another policy than the one that is trained.
    """
    known = {*honoured, *HARMLESS, *dict(UNANSWERABLE)}  # those of the last that are refused never come here
    asked = (name for name, value in body.items() if value is not None and name not in known and value != NEUTRAL.get(name))
    return tuple(re.sub(r"[^A-Za-z0-9_.-]", "?", name)[:40] for name in islice(asked, MOST_NAMED))


def overruled(body: Mapping[str, Any], sampling: SamplingParameters, hints: Collection[str] = ()) -> str:
    """Return which fields of a body are not honoured, and what is used instead of sampling fields; empty if all are.

    `hints`: the fields that are ignored.
    """
    theirs = {name: body[name] for name in SAMPLING if isinstance(body.get(name), int | float)}
    ours = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    noted = [f"{name}={ours[name]}" for name, value in theirs.items() if value != ours[name]]
    if body.get("tool_choice") not in (None, *FREE):
        noted.append("tool_choice=auto")
    return ", ".join((*noted, *(f"{name}=ignored" for name in hints)))


def shown(value: object) -> str:
    """Return a value as it is quoted in an error: short, on one line, printable."""
    return ascii(value)[:60]
