"""`grpo run` continues while the disk is full or no process can be started."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from services.console.display.plain import PlainDisplay
from services.console.paths import RunPaths
from services.console.run.launcher import Launcher
from services.console.run.mirror import Mirror, RunRecords
from services.operations.observe import Poll
from services.runtime.child_processes import ChildProcess, ProcessPlan, ServicePlan
from tests.support.harness import wait_until

WAITS = ServicePlan("dataprep-0", (ProcessPlan("dataprep-0", (sys.executable, "-c", "import time; time.sleep(600)")),))


class OneStepAPoll:
    """An observer of a run that records a step with every poll."""

    fault = ""

    def __init__(self) -> None:
        self.last, self.step = Poll(), 0

    async def poll(self) -> Poll:
        self.last = Poll(at=0.0, records=[{"step": float(self.step), "time_s": 1.0}])
        self.step += 1
        return self.last

    async def poll_to_end(self) -> AsyncGenerator[Poll]:
        for poll in ():
            yield poll


def launcher(folder: Path) -> tuple[Launcher, OneStepAPoll]:
    observer: Any = OneStepAPoll()
    display = PlainDisplay(10, folder / "logs")
    return Launcher(
        lambda _: [WAITS],
        1,
        1,
        observer,
        RunRecords(RunPaths(folder)),
        display,
        logs=folder / "logs",
        environ=dict(os.environ),
        lock_fd=0,
        server=None,
    ), observer


async def through(console: Launcher, meanwhile: Callable[[], Any]) -> None:
    running = asyncio.create_task(console.run())
    await meanwhile()
    console.interrupt()
    assert (await running).status == "stopped"


async def test_records_that_cannot_be_written_end_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    console, observer = launcher(tmp_path)
    monkeypatch.setattr("services.console.run.launcher.POLL_EVERY_S", 0.02)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def meanwhile() -> None:
        await wait_until(lambda: observer.step > 3)
        with monkeypatch.context() as disk:
            disk.setattr(Mirror, "_append", full)
            later = observer.step + 3
            await wait_until(lambda: observer.step > later)
        later = observer.step + 3
        await wait_until(lambda: observer.step > later)
        assert [child.alive for child in console.children] == [True]

    await through(console, meanwhile)
    written = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written == list(range(len(written)))
    assert len(written) > 6
    shown = capsys.readouterr().out
    assert shown.count("metrics.jsonl cannot be written: No space left on device; the run continues") == 1
    assert shown.count("the run's records are written again") == 1


async def test_a_service_that_cannot_be_started_now_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    console, _ = launcher(tmp_path)
    monkeypatch.setattr("services.console.run.launcher.AGAIN_S", 0.2)
    start, refusals = ChildProcess.start, [errno.EAGAIN, errno.ENOSPC]

    def refused(self: ChildProcess, environ: Mapping[str, str], *files: int) -> None:
        if refusals:
            raise OSError(code := refusals.pop(0), os.strerror(code))
        start(self, environ, *files)

    monkeypatch.setattr(ChildProcess, "start", refused)
    await through(console, lambda: wait_until(lambda: console.children and console.children[0].alive))
    assert capsys.readouterr().out.count("dataprep-0 cannot be started") == 2


async def test_a_service_that_could_not_be_started_can_be_scaled_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    console, _ = launcher(tmp_path)
    wanted = [WAITS, ServicePlan("generator-0", (ProcessPlan("generator-0", ("never",)),))]
    console.plan = lambda _: wanted
    start = ChildProcess.start

    def refused(self: ChildProcess, environ: Mapping[str, str], *files: int) -> None:
        if self.name == "generator-0":
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        start(self, environ, *files)

    async def meanwhile() -> None:
        await wait_until(lambda: len(console.children) == 2)
        wanted.pop()
        await wait_until(lambda: len(console.children) == 1)

    monkeypatch.setattr(ChildProcess, "start", refused)
    await through(console, meanwhile)
    assert "generator-0 is no longer needed and was not started" in capsys.readouterr().out


async def test_a_redis_that_cannot_be_restarted_now_is_restarted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    console, _ = launcher(tmp_path)
    monkeypatch.setattr("services.console.run.launcher.AGAIN_S", 0.1)
    refusals = [errno.ENOSPC, errno.ENOSPC]

    class Server:
        alive = False

        def start(self) -> None:
            if refusals:
                raise OSError(code := refusals.pop(0), os.strerror(code))
            self.alive = True

    server: Any = Server()
    console.server, console.restarts["redis"] = server, 0
    await through(console, lambda: wait_until(lambda: server.alive))
    assert capsys.readouterr().out.count("Redis cannot be restarted: [Errno 28] No space left on device; trying again") == 2


async def test_a_run_can_be_stopped_before_any_of_its_services_could_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console, observer = launcher(tmp_path)

    def refused(*_: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(ChildProcess, "start", refused)
    await through(console, lambda: wait_until(lambda: observer.step > 0 and console.children))
