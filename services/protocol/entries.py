"""Encodes a reasoning-gym entry as text: the `answer` of a ticket for such a task.

Guarantees: decoding restores what was encoded, including tuples and integer keys; some tasks' scorers compare against them and
would treat a list as a wrong answer.
"""

from __future__ import annotations

import json
from typing import Any, cast

_TUPLE = "__tuple__"
_ITEMS = "__items__"


def encode_entry(entry: dict[str, Any]) -> str:
    """Return the JSON of an entry. Raises TypeError for a value that JSON cannot represent."""
    return json.dumps(_pack(entry), ensure_ascii=False, separators=(",", ":"))


def decode_entry(text: str) -> dict[str, Any]:
    """Return the entry that `encode_entry` wrote. Raises ValueError for anything else."""
    entry = json.loads(text, object_hook=_unpack)
    if not isinstance(entry, dict):
        raise ValueError("not a reasoning-gym entry")
    return cast("dict[str, Any]", entry)


def _pack(value: Any) -> Any:
    if isinstance(value, tuple):
        return {_TUPLE: [_pack(item) for item in cast("tuple[Any, ...]", value)]}
    if isinstance(value, list):
        return [_pack(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        table = cast("dict[Any, Any]", value)
        if all(isinstance(key, str) for key in table) and not table.keys() & {_TUPLE, _ITEMS}:
            return {key: _pack(item) for key, item in table.items()}
        return {_ITEMS: [[_pack(key), _pack(item)] for key, item in table.items()]}
    return value


def _unpack(table: dict[str, Any]) -> Any:
    if table.keys() == {_TUPLE}:
        return tuple(table[_TUPLE])
    if table.keys() == {_ITEMS}:
        return dict(table[_ITEMS])
    return table
