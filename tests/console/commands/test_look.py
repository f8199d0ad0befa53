"""`grpo ls` and `grpo logs` on folders of runs in any state."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from services.console.commands.__main__ import main
from services.console.lock import FolderLock
from services.console.run.folder import RunFolder
from services.operations.condition import Condition, Word
from tests.support.console import ROOT
from tests.support.harness import small_config


@contextlib.contextmanager
def killed_at_the_end(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill a process at the end, in case a failed test leaves it behind."""
    try:
        yield
    finally:
        process.kill()


def run_folder(parent: Path, name: str, steps: int = 0, status: str = "") -> RunFolder:
    """Create the folder of a run that trained `steps` of its four steps and ended with `status`; return it."""
    config = small_config(parent / f"{name}-given", None, f"run.name={name}", f"run.dir={parent / 'runs'}")
    folder = RunFolder.of(config)
    folder.write(config)
    records = [{"step": step, "reward/train/mean": step / 4} for step in range(steps)]
    folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 9, "rew')
    if status:
        folder.note(Condition(cast("Word", status)))
    return folder


def test_runs_are_listed_with_their_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, steps, status in (("done", 4, "finished"), ("halted", 2, "stopped"), ("killed", 1, ""), ("new", 0, "")):
        run_folder(tmp_path, name, steps, status)
    with FolderLock(tmp_path / "runs" / "new"):
        assert main(["ls", str(tmp_path / "runs"), "--json"]) == 0
    found = {run["run"]: run for run in json.loads(capsys.readouterr().out)["runs"]}
    assert {name: (run["state"], run["steps"], run["of"], run["reward"]) for name, run in found.items()} == {
        "done": ("finished", 4, 4, 0.75),
        "halted": ("stopped", 2, 4, 0.25),
        "killed": ("stopped", 1, 4, 0.0),
        "new": ("running", 0, 4, None),
    }
    assert main(["ls", str(tmp_path / "runs")]) == 0
    assert "4/4" in capsys.readouterr().out
    with FolderLock(tmp_path / "runs" / "new"):
        pass  # listing leaves no lock behind


@pytest.mark.parametrize("content", ["[run", "[run]\nname = 3\n", "run = 1\n", "\x00"])
def test_a_run_that_cannot_be_read_does_not_hide_the_others(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder(tmp_path, "whole", 4, "finished")
    damaged = run_folder(tmp_path, "damaged")
    damaged.config.write_text(content)
    assert main(["ls", str(tmp_path / "runs"), "--json"]) == 0
    out, error = capsys.readouterr()
    assert [run["run"] for run in json.loads(out)["runs"]] == ["whole"]
    assert f"{damaged.path}" in error
    assert len(error.splitlines()) == 1


def test_a_folder_without_runs_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(tmp_path)]) == 0
    assert f"no runs in {tmp_path}" in capsys.readouterr().out


def test_the_last_lines_of_every_log_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path, "logged")
    (folder.logs / "trainer-0.log").write_text("".join(f"step {i}\n" for i in range(50)))
    (folder.logs / "generator-0.log").write_bytes("ready\n\x1b[2J gone \xff".encode("latin-1"))
    assert main(["logs", str(folder.path), "-n", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "generator-0  ready", "generator-0  \\e[2J gone �", "trainer-0    step 48", "trainer-0    step 49",
    ]  # fmt: skip
    assert main(["logs", str(folder.path), "trainer", "-n", "1"]) == 0
    assert capsys.readouterr().out == "step 49\n"
    assert main(["logs", str(folder.path), "webb"]) == 2
    assert "no log of 'webb'" in capsys.readouterr().err


def test_logs_are_followed_until_ctrl_c(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, "followed")
    log = folder.logs / "trainer-0.log"
    log.write_text("old\n")
    command = [sys.executable, "-u", "-m", "services.console.commands", "logs", str(folder.path), "-f"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process, killed_at_the_end(process):
        assert process.stdout is not None
        assert process.stdout.readline() == "old\n"
        with log.open("a") as lines:
            lines.write("new\nhalf a ")
            lines.flush()
            assert process.stdout.readline() == "new\n"
            lines.write("line\n")
        assert process.stdout.readline() == "half a line\n"
        log.write_text("anew\n")
        assert process.stdout.readline() == "anew\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
