"""How a pod handles malformed frames from a worker process."""

from __future__ import annotations

import asyncio

import pytest

from services.config.environments import PythonEnvironment
from services.environment.programs.process import ProcessLost, ProgramProcess
from services.verifiers.sandbox.frames import LENGTH


@pytest.mark.parametrize(
    "body", [b"\x92\x01" + b"\x91" * 20_000 + b"\xc0", b"\x93\x01", b"\xc1"], ids=["deep", "cut", "no value"]
)
async def test_a_malformed_frame_ends_the_process(body: bytes) -> None:
    process, reader = ProgramProcess(PythonEnvironment(name="e", kind="python", function="m:C")), asyncio.StreamReader()
    answer = process._waiting[1] = asyncio.get_running_loop().create_future()
    reader.feed_data(LENGTH.pack(len(body)) + body)
    async with asyncio.timeout(10):
        await process._read(reader)
        with pytest.raises(ProcessLost, match="wrote garbage and was killed"):
            await answer
