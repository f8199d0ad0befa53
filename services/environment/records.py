"""The history of a rollout, as it is committed: turns of the policy, and replies of the environment.

Guarantees: decoding any bytes gives records from which a rollout can continue, or none, and then it starts again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from services.protocol import codec
from services.protocol.payloads import Turn

TURN, REPLY = b"T", b"R"
RECORD_BYTES = 8 << 20
"""Maximum size of a record in bytes: it includes a snapshot."""


class EnvironmentReply(msgspec.Struct, frozen=True, array_like=True):
    """An environment's reply, at the start or after a turn. Produced by environments, consumed by the ticket's next holder."""

    messages: str  # JSON: list of messages, or null if the rollout has ended
    tools: str  # JSON: descriptions of the tools; empty: those of the record before
    snapshot: str  # JSON of the program's state after it; empty: it cannot be restored
    seconds: float  # that the environment took


Record = Turn | EnvironmentReply


def pack_record(record: Record) -> bytes:
    """Encode a record. Raises ValueError for one that is too large."""
    data = (TURN if isinstance(record, Turn) else REPLY) + codec.encode(record)
    if len(data) > RECORD_BYTES:
        raise ValueError(f"a turn or a reply has {len(data)} bytes with its snapshot, more than {RECORD_BYTES}")
    return data


def unpack_records(data: Sequence[bytes]) -> list[Record]:
    """Decode the records of a rollout; none if one of them is damaged."""
    try:
        return [codec.decode(each[1:], Turn if each[:1] == TURN else EnvironmentReply) for each in data]
    except codec.CorruptMessage:
        return []


def reply_of(
    messages: list[dict[str, Any]] | None, state: Any, seconds: float, tools: list[dict[str, Any]] | None = None
) -> EnvironmentReply:
    """Return the record of a reply; without `tools`, they are those of the reply before.

    Raises TypeError for a state that is not JSON.
    """
    described = "" if tools is None else json.dumps(tools)
    return EnvironmentReply(json.dumps(messages), described, "" if state is None else json.dumps(state), seconds)
