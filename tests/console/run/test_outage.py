"""A child process can no longer reach Redis: real launcher and child, and an observer that has lost Redis, too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from services.console.errors import EXIT_REDIS
from services.console.run.launcher import Launcher
from services.operations.observe import Poll
from services.runtime.child_processes import ProcessPlan, ServicePlan
from services.store.records import RunState
from tests.support.harness import wait_until

STATE = RunState(4, 8, 0, 0, -1, -1, -1, -1, "", {}, "", "", "d", "c")


class Away:
    """An observer that has seen the run but can no longer reach it."""

    fault = ""

    def __init__(self) -> None:
        self.last = Poll(time.monotonic(), STATE)

    async def poll(self) -> None:
        """Return nothing, because Redis does not respond."""

    async def poll_to_end(self) -> AsyncGenerator[Poll]:
        """Yield no poll, because Redis does not respond."""
        for poll in ():
            yield poll


async def test_it_is_not_restarted_before_redis_is_back(tmp_path: Path) -> None:
    plan = ServicePlan("dataprep-0", (ProcessPlan("dataprep-0", ("/bin/sh", "-c", f"exit {EXIT_REDIS}")),))
    events, observer = list[str](), Away()
    launcher = Launcher(
        lambda _: [plan], 0, 1, cast("Any", observer), cast("Any", None),
        cast("Any", SimpleNamespace(event=events.append)), logs=tmp_path, environ={}, lock_fd=2, server=None,
    )  # fmt: skip
    running = asyncio.create_task(launcher.run())
    await wait_until(lambda: launcher.children and launcher.children[0].codes == [EXIT_REDIS])
    await asyncio.sleep(1)  # twice the pause before a restart: nothing may happen meanwhile
    assert launcher.restarts == {"dataprep-0": 0}
    observer.last = Poll(time.monotonic(), STATE)
    await wait_until(lambda: launcher.restarts == {"dataprep-0": 1})
    assert events == ["dataprep-0 failed with exit code 3; restarting dataprep-0 in 0.5 s"]
    launcher.interrupt()
    assert (await running).status == "stopped"
