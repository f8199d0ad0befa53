"""Supervised loops: failures, liveness, fatal errors, and reliable cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from services.config import ConfigError
from services.protocol.errors import DifferentRun, StoreError
from services.runtime import loops
from services.runtime.loops import Fatal, Loop, end_tasks
from services.store import Store


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(loops, "LONGEST_PAUSE_S", 0.004)


async def test_a_failed_loop_is_restarted() -> None:
    lives = []

    async def body(loop: Loop) -> None:
        lives.append(loop.failures)
        if len(lives) < 4:
            raise StoreError("Redis is away")

    loop = Loop("rollouts", body, limit_s=30.0)
    await loop.supervise()
    assert lives == [0, 1, 2, 3]
    assert loop.failures == 3


@pytest.mark.parametrize("error", [Fatal("engine dead"), ConfigError("key"), DifferentRun("name taken")])
async def test_fatal_errors_end_the_process(error: Exception) -> None:
    async def body(_: Loop) -> None:
        raise error

    loop = Loop("work", body, limit_s=30.0)
    with pytest.raises(type(error), match=str(error)):
        await loop.supervise()
    assert loop.failures == 0


async def test_restart_delays_grow_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(loops.asyncio, "sleep", sleep)

    async def body(_: Loop) -> None:
        if len(pauses) < 5:
            raise OSError("again")

    await Loop("notifications", body, limit_s=30.0).supervise()
    assert pauses == [0.001, 0.002, 0.004, 0.004, 0.004]


def test_liveness_is_progress_within_the_limit() -> None:
    async def body(_: Loop) -> None: ...

    loop = Loop("weights", body, limit_s=5.0)
    assert loop.alive
    loop.last_progress -= 6.0
    assert not loop.alive
    assert 6.0 <= loop.silent_s < 60.0
    loop.progress()
    assert loop.alive


async def test_tasks_that_use_redis_can_be_cancelled(store: Store) -> None:
    """redis-py uses `asyncio.wait_for`, which before Python 3.12 loses a cancellation that arrives as the send finishes."""

    async def talk() -> None:
        while True:
            await store.run.state()
            await asyncio.sleep(0.002)

    for _ in range(8):
        tasks = [asyncio.create_task(talk()) for _ in range(3)]
        await asyncio.sleep(random.random() * 0.01)
        await asyncio.wait_for(end_tasks(tasks), 30.0)
        assert all(task.done() for task in tasks)


async def test_tasks_end_although_the_end_of_tasks_is_cancelled() -> None:
    async def stubborn() -> None:
        for _ in range(2):  # loses a cancellation
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    ending = asyncio.create_task(end_tasks([task]))
    await asyncio.sleep(0.01)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert task.done()
