"""A child that cannot reach a Redis that worked: the real launcher and child, and an observer without its Redis."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from services.console.errors import EXIT_REDIS
from services.console.local.launcher import Launcher
from services.operations.observe import Poll
from services.runtime.processes.child_processes import ProcessPlan, ServicePlan
from services.store.records import RunState
from tests.support.harness import wait_until

STATE = RunState(4, 8, 0, 0, -1, -1, -1, -1, "", {}, "", "", "d", "c")


class Away:
    """An observer that saw the run, and does not any more."""

    fault = ""

    def __init__(self) -> None:
        self.last = Poll(time.monotonic(), STATE)

    async def poll(self) -> None:
        """There is no response."""

    async def poll_to_end(self) -> list[Poll]:
        """There is no response."""
        return []


async def test_it_is_not_restarted_before_redis_is_back(tmp_path: Path) -> None:
    plan = ServicePlan("dataprep-0", (ProcessPlan("dataprep-0", ("/bin/sh", "-c", f"exit {EXIT_REDIS}")),))
    told, observer = list[str](), Away()
    launcher = Launcher(
        lambda _: [plan], 0, 1, cast("Any", observer), cast("Any", None), cast("Any", None),
        cast("Any", SimpleNamespace(event=told.append)), logs=tmp_path, environ={}, lock_fd=2, server=None,
    )  # fmt: skip
    running = asyncio.create_task(launcher.run())
    await wait_until(lambda: launcher.children and launcher.children[0].codes == [EXIT_REDIS])
    await asyncio.sleep(1)  # twice the pause before a restart: nothing must happen
    assert launcher.restarts == {"dataprep-0": 0}
    observer.last = Poll(time.monotonic(), STATE)
    await wait_until(lambda: launcher.restarts == {"dataprep-0": 1})
    assert told == ["dataprep-0 failed with exit code 3; restarting dataprep-0 in 0.5 s"]
    launcher.interrupt()
    assert (await running).status == "stopped"
