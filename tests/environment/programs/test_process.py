"""How a pod handles malformed frames from a worker process, and the end of one."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from services.config.environments import PythonEnvironment
from services.environment.programs.pool import ProgramPool
from services.environment.programs.process import ProcessLost, ProgramProcess

GARBAGE = """
import os, struct, sys

class Garbage:
    def start(self, row):
        body = bytes.fromhex(row["body"])
        os.write(int(sys.argv[1]), struct.pack("<I", len(body)) + body)
"""


async def test_a_malformed_frame_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "garbage.py").write_text(GARBAGE)
    process = ProgramProcess(PythonEnvironment(name="e", kind="python", function=f"{tmp_path}/garbage.py:Garbage"))
    for body in (b"\x92\x01" + b"\x91" * 20_000 + b"\xc0", b"\x93\x01", b"\xc1"):
        await process.ensure()
        with pytest.raises(ProcessLost, match="wrote garbage and was killed"):
            await process.do("0", "start", {"body": body.hex()})
        assert not process.alive
    await process.kill()


@pytest.mark.parametrize("starting", [False, True])
def test_no_process_outlives_a_pool_whose_close_is_cancelled_at_once(starting: bool, tmp_path: Path) -> None:
    (tmp_path / "garbage.py").write_text(GARBAGE)
    environment = PythonEnvironment(name="e", kind="python", function=f"{tmp_path}/garbage.py:Garbage")
    with asyncio.Runner() as runner:
        pool = ProgramPool(environment)
        [process] = pool.processes

        async def started() -> int:
            begun = asyncio.create_task(pool.start())
            while process.pid is None:
                await asyncio.sleep(0.01)
            if not starting:
                await begun
            assert process.pid is not None
            return process.pid

        async def cancelled() -> None:
            closing = asyncio.create_task(pool.close())
            await asyncio.sleep(0)
            closing.cancel()

        pid = runner.run(started())
        runner.run(cancelled())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
