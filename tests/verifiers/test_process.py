"""Workers run untrusted code: whatever they send is either read or rejected."""

from __future__ import annotations

import asyncio

import pytest

from services.verifiers.results import Verdict, fault_of
from services.verifiers.sandbox.frames import LENGTH, BadFrame, Hello, read_frame

DEEP = "[" * 5000 + "]" * 5000


@pytest.mark.parametrize(
    "body",
    [
        b"\x92\xa0" + b"\x91" * 20_000 + b"\xc0", b"\x93\xa0\x80" + b"\x91" * 20_000 + b"\xc0", b"\x92\xa0", b"\xc1",
        b"\x92\xa1\xff\x80",
    ],
    ids=["deep", "deep and surplus", "cut", "no value", "not UTF-8"],
)  # fmt: skip
async def test_malformed_frames_are_rejected(body: bytes) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(LENGTH.pack(len(body)) + body)
    async with asyncio.timeout(10):
        with pytest.raises(BadFrame):
            await read_frame(reader, Hello)


@pytest.mark.parametrize("note", [DEEP, "{", "\ud800", '"\ud800"', "null"])
def test_notes_that_are_not_json_are_a_fault(note: str) -> None:
    assert "one that is not JSON" in fault_of(Verdict([1.0], {}, [note]), 1, None)
