"""Workers run untrusted code: whatever they send is either read or rejected."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from services.confined.frames import LENGTH, BadFrame, read_frame


class Answer(msgspec.Struct, array_like=True):
    """A frame."""

    error: str = ""
    needs: dict[str, list[str]] = {}


async def test_malformed_frames_are_rejected() -> None:
    bodies = {
        "deep": b"\x92\xa0" + b"\x91" * 20_000 + b"\xc0", "deep and surplus": b"\x93\xa0\x80" + b"\x91" * 20_000 + b"\xc0",
        "cut": b"\x92\xa0", "no value": b"\xc1", "not UTF-8": b"\x92\xa1\xff\x80",
    }  # fmt: skip
    for name, body in bodies.items():
        reader = asyncio.StreamReader()
        reader.feed_data(LENGTH.pack(len(body)) + body)
        async with asyncio.timeout(10):
            with pytest.raises(BadFrame):
                pytest.fail(f"{name}: {await read_frame(reader, Answer)}")
