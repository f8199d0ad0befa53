"""The cause of a child process's exit if the kernel knows more than its log."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from services.runtime import exits
from services.runtime.child_processes import ChildProcess, ProcessPlan
from services.runtime.exits import OUT_OF_MEMORY, oom_kills
from tests.support.console import wait_until

KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
TERMINATED = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
BY_ITS_CHILD = "raise SystemExit('error: Engine core initialization failed. See root cause above.')"
BY_ITSELF = "raise ValueError('no such model')"


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that takes the place of the kernel's counter, the only source used."""
    path = tmp_path / "memory.events"
    path.write_text("low 0\noom 7\noom_kill 2\noom_group_kill 0\n")
    monkeypatch.setattr(exits, "COUNTERS", (tmp_path / "missing", path, Path("/proc/vmstat")))
    return path


@pytest.mark.parametrize(
    ("program", "before", "after"),
    [
        (KILLED, "", OUT_OF_MEMORY),
        (TERMINATED, "", ""),
        (BY_ITS_CHILD, "Engine core initialization failed. See root cause above.", OUT_OF_MEMORY),
        (BY_ITSELF, "ValueError: no such model", "ValueError: no such model"),
        ("", "", ""),
    ],
)
def test_a_lack_of_memory_is_the_cause_of_a_kill(tmp_path: Path, counter: Path, program: str, before: str, after: str) -> None:
    child = ChildProcess(ProcessPlan("child", (sys.executable, "-c", program)), tmp_path)
    child.start(os.environ)
    wait_until(lambda: child.code is not None, "the child's end")
    assert child.cause() == before
    counter.write_text("oom_kill 3\n")
    assert child.cause() == after


def test_the_counter_of_this_machine_is_read() -> None:
    lines = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    assert 0 <= oom_kills() <= int(lines["oom_kill"])
