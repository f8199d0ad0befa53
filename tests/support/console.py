"""Launch runs of fake services, and inspect what they leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.operations.history import recorded
from tests.support.harness import small_config

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 300.0  # for a command that takes seconds on an idle machine: tests share theirs with ten others


def config_file(folder: Path) -> Path:
    """Write the configuration file of the run `small` in `folder`, and return its path."""
    small_config(folder)
    return folder / "run.toml"


def wait_until(condition: Callable[[], Any], what: str = "", limit_s: float = LIMIT_S) -> Any:
    """Poll until `condition` returns a true value; fail after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {limit_s} s: {what}")


def command(*arguments: str | Path) -> list[str]:
    """Return the command of a launch with fake services."""
    return [sys.executable, "-m", "tests.console.run.launch", *map(str, arguments)]


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a launch, without GPUs and without the caller's Redis password."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **changes}


def grpo(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command to completion."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=LIMIT_S, env=environment(**environ), check=False, cwd=ROOT
    )


@contextmanager
def launched(*arguments: str | Path, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command in the background; kill it at the end if it is still running."""
    process = subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**environ), cwd=ROOT
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate(timeout=LIMIT_S)


def processes_of(run: Path) -> dict[str, int]:
    """Return the running service processes of a run folder, and its Redis server, by name."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            argv = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "tests.console.fake_service" in argv and str(run / "config.toml") in argv:
            found[argv[argv.index("--name") + 1]] = int(entry.name)
    for pid in _servers(run):
        found["redis"] = pid
    return found


def _servers(run: Path) -> list[int]:
    servers = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(entry / "cwd")) == run / "redis":
                servers.append(int(entry.name))
        except OSError:
            continue
    return servers


def lives(pid: int) -> bool:
    """Return whether a process is running; a zombie does not count."""
    return state_of(pid) not in ("", "Z")


def state_of(pid: int) -> str:
    """Return the state of a process: R, S (waits), T (stopped), Z …; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def steps(run: Path) -> list[int]:
    """Return the steps in metrics.jsonl, in order."""
    return [record["step"] for record in recorded(run / "metrics.jsonl")]


def log(run: Path, pod: str) -> str:
    """Return the log of a pod."""
    path = run / "logs" / f"{pod}.log"
    return path.read_text() if path.exists() else ""
