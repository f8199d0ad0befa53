"""Messages between a worker process and who started it: msgpack frames over a socket pair, each preceded by its length (4 bytes,
little-endian)."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

LENGTH = struct.Struct("<I")
REPLY_BYTES = 64 << 20
"""Maximum number of bytes of a frame from a worker, which runs code that is not ours."""


class BadFrame(ValueError):
    """A worker sent a frame that none of our code would send."""


def frame(message: Any) -> bytes:
    """Return the bytes of a message, length first."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader, kind: type[T]) -> T:
    """Return the next message of a worker. Raises `BadFrame`, `EOFError` or `ConnectionError`."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > REPLY_BYTES:
        raise BadFrame(f"a frame of {length} bytes, more than {REPLY_BYTES}")
    try:
        return msgspec.msgpack.decode(await reader.readexactly(length), type=kind)
    except (ValueError, RecursionError) as error:  # also text that is not UTF-8, and a value that is nested too deep
        raise BadFrame(str(error)) from None
