"""Cases of `tool_calls.jsonl`: a reply in a notation of tool calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.chat.calls import MalformedCall
from services.chat.format import PARSERS


def attempt(case: dict[str, Any], folder: Path, scratch: Path) -> tuple[Any, bool]:
    """Return the arguments of the calls that are found, `text` for none, or the fault of a malformed one."""
    tools = [{"type": "function", "function": {"name": case["tool"], "parameters": case["parameters"]}}]
    try:
        calls = PARSERS[case["notation"]](case["text"], tools).calls
    except MalformedCall as error:
        return f"error: {error}", case["right"] == "error" and " at 0x" not in str(error)
    found: Any = [call.arguments for call in calls]
    if len(found) < 2:
        found = found[0] if found else "text"
    return found, same(found, case["right"]) and all(call.name == case["tool"] for call in calls)


def same(found: object, right: object) -> bool:
    """Return whether values are equal with their types: 12 is not 12.0, and 1 is not true."""
    return found == right and repr(found) == repr(right)
