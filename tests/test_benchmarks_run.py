"""Benchmarks that nothing else runs: the quick ones at small sizes, and the configurations of the long ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import accounting, reuse
from services.config import load
from tests.support.harness import small_config
from tests.support.preloading.starter import PLAIN

ROOT = Path(__file__).parent.parent
SMALL = {
    "datapath": ("--groups=64", "--repeats=1"),
    "stream": ("--groups=64", "--repeats=1"),
    "settling": ("--groups=2048",),
    "snapshot": ("--groups=500",),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_quick_benchmark_reports_its_figures(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", *SMALL[name]]
    environ = os.environ | {PLAIN: "1"}  # settling checks what its process imports
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["benchmark"] == name


def test_the_benchmark_of_replay_has_a_valid_configuration() -> None:
    config = load(ROOT / reuse.CONFIG, [reuse.BOUND, *reuse.REPLAY], environ={})
    assert config.replay.max_uses == config.admission.max_staleness + 1


@pytest.mark.parametrize("run", accounting.RUNS)
def test_each_run_of_the_accounting_has_a_valid_configuration(run: str, tmp_path: Path) -> None:
    assert small_config(tmp_path, None, *accounting.RUNS[run]).run.name == "small"
