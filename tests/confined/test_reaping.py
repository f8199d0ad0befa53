"""A worker that is ended is reaped, whoever waits for it and even if its event loop is closed at once."""

from __future__ import annotations

import asyncio
import os

from services.confined.worker import ConfinedWorker, Launch
from services.verifiers.base import Hello, Setup


def gone(pid: int) -> bool:
    """Return whether a process has been reaped, so that nothing has its number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def started() -> tuple[ConfinedWorker, int]:
    worker = ConfinedWorker(Launch("services.verifiers.worker", guarded=True))
    await worker.start(Setup([], [], False, 1 << 32, False, 0), Hello)
    assert worker.pid is not None
    return worker, worker.pid


async def test_a_second_call_waits_for_what_the_first_reaps() -> None:
    worker, pid = await started()
    first = worker.kill()
    await worker.kill()
    assert gone(pid)
    await first


async def test_a_worker_is_reaped_although_the_first_wait_for_its_end_is_cancelled() -> None:
    worker, pid = await started()
    ending = asyncio.create_task(worker.end(EOFError()))
    await asyncio.sleep(0)
    ending.cancel()
    await asyncio.gather(ending, return_exceptions=True)
    await worker.kill()
    assert gone(pid)


def test_a_process_is_reaped_although_the_loop_is_closed_at_once() -> None:
    with asyncio.Runner() as runner:
        worker, pid = runner.run(started())
        loop = runner.get_loop()
        loop.call_soon(worker.kill)
        loop.call_soon(loop.stop)
        loop.run_forever()
    assert gone(pid)
