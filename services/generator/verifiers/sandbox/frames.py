"""Messages between pool and worker: msgpack frames over a socket pair, each preceded by its length (4 bytes, little-endian)."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

LENGTH = struct.Struct("<I")


class Setup(msgspec.Struct, array_like=True):
    """First frame to a worker: the configuration, as `model_dump(mode="json")` returns it."""

    verifiers: list[dict[str, Any]]
    sources: list[dict[str, Any]]


class Hello(msgspec.Struct, array_like=True):
    """First frame of a worker: it is ready, or the reason why it cannot be."""

    error: str = ""


class Job(msgspec.Struct, array_like=True):
    """A group to score."""

    completions: list[str]
    answer: str
    source: str


class Verdict(msgspec.Struct, array_like=True):
    """One verifier's scores of the group, in the order of its source's verifiers. One with an error ends the group."""

    scores: list[float]
    error: str = ""


def frame(message: Any) -> bytes:
    """Return the bytes of a message, length first."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body
