"""A guard ends everything that its command has started, however much that is and however it tries to escape."""

from __future__ import annotations

import subprocess
import sys

import pytest

from services.confined import guard

MANY = """
import os, sys, time
for _ in range(1500):
    if not os.fork():
        time.sleep(60)
        os._exit(0)
print("begun", flush=True)
time.sleep(60)
"""
CHAIN = """
import os, time
print("begun", flush=True)
end = time.monotonic() + 60
while time.monotonic() < end:
    if os.fork():
        os._exit(0)
    os.setsid()
"""
"""Each process of it lives for less than a scan of all processes takes."""
LIMIT_S = 15.0
"""Seconds for a guard to end; it takes less than one."""


@pytest.mark.parametrize("code", [MANY, CHAIN], ids=["many processes", "a chain"])
def test_a_guard_ends_quickly(code: str) -> None:
    guarded = subprocess.Popen([*guard.guarded(), sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert guarded.stdout is not None
        assert guarded.stdout.readline() == b"begun\n"
        guarded.terminate()
        guarded.wait(LIMIT_S)  # when it has ended by itself, nothing of its command is left
    finally:
        guarded.kill()
        guarded.communicate()


SETUID = """
import os, signal, subprocess
from services.confined import guard
kill, other, own = os.kill, subprocess.Popen(["sleep", "60"]), subprocess.Popen(["sleep", "60"])
def refusing(pid, number):
    if pid == other.pid:
        raise PermissionError
    kill(pid, number)
os.kill = refusing
guard.kill_descendants()
assert not os.path.exists(f"/proc/{own.pid}")
assert os.path.exists(f"/proc/{other.pid}")
kill(other.pid, signal.SIGKILL)
other.wait()
"""


def test_a_process_that_may_not_be_killed_is_left() -> None:
    """It runs as another user, so that its guard could only wait for it."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", SETUID], check=True, timeout=LIMIT_S)


def test_a_kernel_without_a_list_of_children_is_searched() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        assert child.pid in guard._children()
        assert child.pid in guard._scanned()
    finally:
        child.kill()
        child.wait()
    assert child.pid not in [*guard._children(), *guard._scanned()]
