"""`grpo run` continues and ends as it should if nobody reads what it prints, or the disk that it is written to is full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.console.run.folder import RunFolder
from tests.support.console import LIMIT_S, ROOT, command, config_file, environment, steps


@contextmanager
def unwritable(kind: str) -> Iterator[int]:
    """Yield a file descriptor that takes no output."""
    if kind == "full disk":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, out = os.pipe()
        os.close(reader)
    try:
        yield out
    finally:
        os.close(out)


def ended(out: int, errors: int, file: Path, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("run", file, *options), stdout=out, stderr=errors, text=True, timeout=LIMIT_S, env=environment(**environ),
        check=False, cwd=ROOT,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["full disk", "closed pipe"])
def test_a_run_finishes_without_its_output(tmp_path: Path, kind: str) -> None:
    run = tmp_path / "small"
    with unwritable(kind) as out:
        done = ended(out, subprocess.PIPE, config_file(tmp_path), "run.steps=2")
    assert (done.returncode, done.stderr) == (0, "")
    assert steps(run) == [0, 1]
    assert RunFolder(run).condition_now().word == "finished"


@pytest.mark.parametrize("all_closed", [False, True])
def test_a_failed_run_says_why_without_its_output(tmp_path: Path, all_closed: bool) -> None:
    with unwritable("closed pipe") as out:
        done = ended(out, out if all_closed else subprocess.PIPE, config_file(tmp_path), FAKE_EXIT="dataprep-0:2:no such file")
    assert done.returncode == 2
    assert all_closed or done.stderr.startswith("error: dataprep-0")
    assert RunFolder(tmp_path / "small").condition_now().word == "failed"
