"""A function in a daemon thread gives its result or its error, and keeps no process from ending."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from services.runtime.portal import in_daemon_thread

ABANDON = """
import asyncio, time
from services.runtime.portal import in_daemon_thread

async def abandon():
    try:
        await asyncio.wait_for(in_daemon_thread(lambda: time.sleep(60)), 0.1)
    except TimeoutError:
        print("abandoned")

asyncio.run(abandon())
"""


async def test_a_result_and_an_error_reach_the_caller() -> None:
    assert await in_daemon_thread(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        await in_daemon_thread(lambda: 1 // 0)


async def test_a_stop_iteration_reaches_the_caller() -> None:
    with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
        await asyncio.wait_for(in_daemon_thread(lambda: next(iter(()))), 10)
    assert isinstance(caught.value.__cause__, StopIteration)


def test_a_process_ends_while_an_abandoned_function_runs() -> None:
    done = subprocess.run([sys.executable, "-c", ABANDON], capture_output=True, text=True, timeout=30, check=True)
    assert (done.stdout, done.stderr) == ("abandoned\n", "")
