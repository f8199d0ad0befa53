"""A blocked loop fails its pod's liveness probe within the loop's limit, and no other loop's.

The trainer's loop is its main thread, which tests/runs/test_run_evaluation.py blocks in the middle of a step of a whole run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.console.run.redis_server import RedisServer
from services.http.entry import open_service
from services.protocol.errors import StoreError
from services.runtime.loops import Loop, end_tasks
from services.runtime.service import Service
from services.tracker.follower import Follower
from services.tracker.metrics import TrackerMetrics
from tests.dataprep.test_loop import configured, dataprep
from tests.generator.test_pausing import pod
from tests.support.harness import small_config, wait_until

LIMIT_S = 2.0
Blocked = tuple[Service, str, str]  # pod, name of the loop, the store's method that never returns


@asynccontextmanager
async def running(service: Service, work: Callable[[Loop], Awaitable[None]]) -> AsyncIterator[None]:
    task = asyncio.create_task(service.run(work, LIMIT_S))
    try:
        yield
    finally:
        service.stop()
        await asyncio.gather(end_tasks([task]))
        await service.store.restores.delete_run()


@asynccontextmanager
async def a_generator(folder: Path, server: RedisServer) -> AsyncIterator[Blocked]:
    async with pod(folder, server) as one:
        yield one.service, "work", "tickets.claim"


@asynccontextmanager
async def a_dataprep(folder: Path, server: RedisServer) -> AsyncIterator[Blocked]:
    async with dataprep(configured(folder, server)) as (service, loop), running(service, loop.work):
        yield service, "work", "replay.sweep_and_peek"


@asynccontextmanager
async def a_tracker(folder: Path, server: RedisServer) -> AsyncIterator[Blocked]:
    config = small_config(folder, server, "tracking.tensorboard=true")
    async with open_service("tracker", config, "tracker-0") as service:
        await service.store.run.create("config", "data", 4, 8)
        follower = Follower(
            "tensorboard", config, service.store, folder / "tracking", service.stopping, TrackerMetrics(service.registry)
        )
        service.add_loop("tensorboard", follower.follow, LIMIT_S)

        async def idle(loop: Loop) -> None:
            loop.limit_s = float("inf")
            await asyncio.Event().wait()

        async with running(service, idle):
            yield service, "tensorboard", "monitor.metrics"


@pytest.mark.parametrize("kind", [a_generator, a_dataprep, a_tracker])
async def test_a_blocked_loop_is_detected_and_named(
    kind: Any, tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with kind(tmp_path, server) as (service, name, method), httpx.AsyncClient(timeout=60) as http:
        await wait_until(lambda: any(loop.name == name for loop in service.loops), 60)
        (loop,) = (loop for loop in service.loops if loop.name == name)
        loop.limit_s, came_by = LIMIT_S, loop.last_progress
        await wait_until(lambda: loop.last_progress > came_by, 60)  # it works
        live = f"{service.status.url}/health/live"
        await wait_until(lambda: _status(http, live, 200), 60)
        held, release = asyncio.Event(), asyncio.Event()

        async def never(*_: object, **__: object) -> None:
            held.set()
            await release.wait()
            raise StoreError("released by the test")

        facet, _, call = method.partition(".")
        monkeypatch.setattr(getattr(service.store, facet), call, never)
        service.notifications.notify_all()
        async with asyncio.timeout(60):
            await held.wait()
        try:
            await wait_until(lambda: _status(http, live, 503), 60)
            loops = (await http.get(live)).json()["loops"]
        finally:
            monkeypatch.undo()
            release.set()
        assert [one for one, health in loops.items() if not health["alive"]] == [name], "only that loop must be reported"
        assert loops[name]["silent_s"] > loops[name]["limit_s"] == LIMIT_S


async def _status(http: httpx.AsyncClient, live: str, status: int) -> bool:
    return (await http.get(live)).status_code == status


STOPPED = """
import asyncio, sys
from services.config import load
from services.http.entry import open_service

async def main():
    async with open_service("dataprep", load(sys.argv[1], environ={}), "stopped") as service:
        print(service.status.url, flush=True)
        await service.run(lambda loop: asyncio.Event().wait(), 600)

asyncio.run(main())
"""


def test_a_stopped_process_answers_no_probe_until_continued(tmp_path: Path, server: RedisServer) -> None:
    """SIGSTOP also stops the endpoints: a probe with a timeout fails, as with a blocked interpreter."""
    small_config(tmp_path, server)
    process = subprocess.Popen([sys.executable, "-c", STOPPED, str(tmp_path / "run.toml")], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert httpx.get(f"{url}/health/live", timeout=60).status_code == 200
        os.kill(process.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(httpx.TimeoutException):
            httpx.get(f"{url}/health/live", timeout=1.0)
        assert time.monotonic() - began >= 1.0
        os.kill(process.pid, signal.SIGCONT)
        assert httpx.get(f"{url}/health/live", timeout=60).status_code == 200
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
