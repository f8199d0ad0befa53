"""Two trainer ranks as processes that run a test's script."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from services.runtime.process_tools import free_port

ROOT = Path(__file__).parents[3]


@asynccontextmanager
async def two_ranks(folder: Path, code: str, *arguments: object) -> AsyncIterator[list[Process]]:
    """Run `code` with `arguments` as ranks 0 and 1, with output in pipes. Kill the ranks that are still running at the end."""
    script = folder / "rank.py"
    script.write_text(code)
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    command = (sys.executable, str(script), *map(str, arguments))
    environs = [os.environ | master | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    ranks = [await asyncio.create_subprocess_exec(*command, env=environ, stdout=PIPE) for environ in environs]
    try:
        yield ranks
    finally:
        for process in ranks:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def address(rank: Process) -> tuple[str, int]:
    """Return the host and port that a rank prints on a separate line."""
    assert rank.stdout is not None
    while not (line := await rank.stdout.readline()).startswith(b"127.0.0.1 "):  # DeepSpeed logs to the same pipe
        assert line, "the rank ended early"
    host, port = line.split()
    return host.decode(), int(port)


def zero_engine(model: Any, optimizer: Any, stage: Mapping[str, Any], **more: object) -> Any:
    """Return the DeepSpeed engine of one rank. `stage`: its ZeRO settings; `more`: other DeepSpeed settings."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would compile for a minute on its first run
    config = {
        "train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "zero_optimization": dict(stage),
        "zero_allow_untested_optimizer": True, **more,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, optimizer=optimizer)
    return engine
