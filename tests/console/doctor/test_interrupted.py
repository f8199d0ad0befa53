"""Ctrl-C ends the checks of a run, whatever they wait for."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.newcomer.world import Edit, make, make_model, put, sub
from tests.support.console import environment, wait_until

SLOW = "import time\nfrom pathlib import Path\nPath({!r}).touch()\ntime.sleep(600)\n"


@pytest.mark.parametrize("slow", ["verifiers", "environments"])
def test_a_check_that_takes_long_is_interrupted(tmp_path: Path, slow: str) -> None:
    make_model(tmp_path / "model-0")
    folder, reached = tmp_path / "run", tmp_path / "reached"
    folder.mkdir()
    make(folder, tmp_path / "model-0")
    edits: list[Edit] = [put("reward.py", SLOW.format(str(reached)) + "def score(completion, answer): return 0.0\n")]
    if slow == "environments":
        edits = [
            put("own.py", SLOW.format(str(reached)) + "class Own:\n    def score(self): return 0.0\n"),
            sub("[sampling]", '[[environments]]\nname = "own"\nkind = "python"\nfunction = "own.py:Own"\n\n[sampling]'),
            sub('prompt_field = "prompt"', 'prompt_field = "prompt"\nenvironment = "own"'),
        ]
    for edit in edits:
        edit(folder)
    command = [sys.executable, "-m", "services.console.commands", "run", "my.toml"]
    with subprocess.Popen(command, env=environment(), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        wait_until(lambda: reached.exists() or process.poll() is not None, "the check")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
