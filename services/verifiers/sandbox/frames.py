"""Messages between pool and worker: msgpack frames over a socket pair, each preceded by its length (4 bytes, little-endian)."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

LENGTH = struct.Struct("<I")
REPLY_BYTES = 64 << 20
"""Maximum number of bytes of a frame from a worker, which runs code that is not ours."""


class Setup(msgspec.Struct, array_like=True):
    """First frame to a worker: what `model_dump(mode="json")` returns for verifiers and sources, and its freedoms."""

    verifiers: list[tuple[str, dict[str, Any]]]  # name, configuration
    sources: list[dict[str, Any]]
    network: bool = False
    memory_bytes: int = 0  # of address space; 0: no limit
    prints: bool = False  # whether what verifiers print is shown


class Hello(msgspec.Struct, array_like=True):
    """First frame of a worker: it is ready, or the reason why it cannot be."""

    error: str = ""
    needs: dict[str, list[str]] = {}  # source -> fields of a group that its verifiers ask for


def frame(message: Any) -> bytes:
    """Return the bytes of a message, length first."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body
