"""Whole runs through `grpo run`: their configuration, their processes, and what they leave in their folders.

It is a plugin (tests/conftest.py), so its fixtures are available everywhere and no run outlives the test that started it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.config import to_toml
from tests.support.documented import undocumented
from tests.support.harness import save_model_folder, small_config
from tests.support.once import once
from tests.support.preloading.starter import PLAIN

STEPS = 8

_started: list[subprocess.Popen[str]] = []


def write_run(folder: Path, name: str, *overrides: str) -> Path:
    """Write a configuration file for `grpo run`; the console adds server, password and token."""
    config = small_config(
        folder, None, f"run.name={name}", f"run.steps={STEPS}", "generator.count=2", "checkpoint.every_steps=2", "run.seed=3",
        'api.token_file=""', 'redis.password_file=""', "generator.engine_options.token_s=0.03", "trainer.deterministic=true",
        "optimizer.learning_rate=1e-3", "sync.deadline_s=10", "trainer.row_tokens=512",
        'verifiers=[{kind="regex", pattern="[0-4]"}]', "filters.exclude_pass_rate=0.75",  # rewards that vary, and excluded rows
        *overrides,
    )  # fmt: skip
    path = folder / f"{name}.toml"
    path.write_text(to_toml(config))
    return path


def start(path: Path, *options: str, **environ: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "services.console.commands", "run", str(path), "--no-screen", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | environ)
    _started.append(process)
    return process


def finish(process: subprocess.Popen[str], limit_s: float = 240) -> str:
    output, _ = process.communicate(timeout=limit_s)
    assert process.returncode == 0, output
    return output


def summary(folder: Path, name: str) -> dict[str, float]:
    return json.loads((folder / name / "summary.json").read_text())


def weights(folder: Path, name: str) -> str:
    return hashlib.sha256((folder / name / "model" / "model.safetensors").read_bytes()).hexdigest()


def steps_done(folder: Path, name: str) -> int:
    path = folder / name / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0  # the last line may be incomplete


def wait_for(true: Callable[[], bool], process: subprocess.Popen[str], limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the condition was not met"
        time.sleep(0.05)


class Hold:
    """Keeps a run from ending before a test has done its part in the middle of it, however busy the machine is.

    Pass `option` to `write_run`.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name, self._file = folder, name, folder / f"{name}.hold"
        self.option = f'generator.engine_options.hold_file="{self._file}"'
        self.allow(0)

    def reach(self, steps: int, process: subprocess.Popen[str]) -> None:
        """Let the run train this many steps, and wait for them. It trains at most two more."""
        self.allow(steps - 1)
        wait_for(lambda: steps_done(self._folder, self._name) >= steps, process)

    def release(self) -> None:
        """Let the run train all of its steps."""
        self._file.unlink()

    def allow(self, version: int) -> None:
        """Let the generators sample up to a version."""
        part = self._file.with_suffix(".part")
        part.write_text(str(version))
        part.replace(self._file)


def pids_of(folder: Path, name: str, pod: str) -> list[int]:
    """Return the process ids of a pod of this run, found by their command lines."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            words = (proc / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if pod in words and any(str(folder / name) in word for word in words):
            found.append(int(proc.name))
    return found


def kill(folder: Path, name: str, pod: str, process: subprocess.Popen[str]) -> None:
    """Kill a pod's processes, waiting until it has some: a pod that has exited may be about to restart."""
    wait_for(lambda: bool(pids_of(folder, name, pod)), process)
    for pid in pids_of(folder, name, pod):
        with contextlib.suppress(ProcessLookupError):  # it was about to exec another program, or exited with its parent
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all runs on this machine, shared with other pytest-xdist workers. Its path contains a space."""
    with once(tmp_path_factory, "all runs") as (folder, new):
        if new:
            save_model_folder(folder / "model")
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the weights of an undisturbed run whose processes start as a user's do. The number of generators does not matter."""
    with once(tmp_path_factory, "calm") as (_, new):
        if new:
            output = finish(start(write_run(folder, "calm", "generator.count=1"), **{PLAIN: "1"}))
            assert "0 tickets lost, 0 duplicated" in output
    assert weights(folder, "calm") != hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()
    return weights(folder, "calm")


def check_whole(folder: Path, name: str, steps: int = STEPS) -> None:
    """Check that every step was trained, no ticket was lost or duplicated, and the staleness bound was kept."""
    facts = summary(folder, name)
    assert facts["steps"] == steps
    assert (facts["lost"], facts["doubled"], facts["stale_dropped"]) == (0, 0, 0)
    assert facts["max_lag"] <= 1
    assert facts["syncs"] == steps + 1
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(steps))
    assert not undocumented(key for record in records for key in record)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """Stop runs that a failed test started and did not wait for."""
    while _started:
        with _started.pop() as process:  # the context manager closes its pipe
            if process.poll() is not None:
                continue
            process.terminate()
            try:
                process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()  # its services exit with it
