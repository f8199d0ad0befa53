"""How a pool handles malformed frames of a verifier worker."""

from __future__ import annotations

import asyncio

import pytest

from services.verifiers.sandbox.frames import LENGTH, BadFrame, Hello, read_frame


@pytest.mark.parametrize(
    "body", [b"\x92\xa0" + b"\x91" * 20_000 + b"\xc0", b"\x93\xa0\x80" + b"\x91" * 20_000 + b"\xc0", b"\x92\xa0", b"\xc1"],
    ids=["deep", "deep and surplus", "cut", "no value"],
)  # fmt: skip
async def test_malformed_frames_are_rejected(body: bytes) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(LENGTH.pack(len(body)) + body)
    async with asyncio.timeout(10):
        with pytest.raises(BadFrame):
            await read_frame(reader, Hello)
