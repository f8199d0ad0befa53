"""The data row in the form that programs receive."""

from __future__ import annotations

from typing import Any

import msgspec

from services.protocol.messages import Row


def row_for(row: str, answer: str) -> dict[str, Any]:
    """Return the fields of a ticket's encoded `Row`, with `prompt` (messages) and `answer`. Raises `msgspec.DecodeError`."""
    found = msgspec.json.decode(row, type=Row)
    return {**found.columns, "prompt": found.messages, "answer": answer}
