"""`grpo run` with a tracker, which is an optional part of the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from services.console.run.plan import plan_units
from tests.support.console import config_file, grpo, log, steps
from tests.support.harness import small_config


def test_the_tracker_is_a_unit_only_if_configured(tmp_path: Path) -> None:
    assert all(unit.essential for unit in plan_units(small_config(tmp_path), Path("c")))
    (unit,) = [
        unit for unit in plan_units(small_config(tmp_path, None, "tracking.tensorboard=true"), Path("c")) if not unit.essential
    ]
    assert unit.name == "tracker-0"
    assert "services.tracker" in unit.pods[0].argv


def test_a_tracker_that_cannot_run_does_not_end_the_run(tmp_path: Path) -> None:
    file, run = config_file(tmp_path), tmp_path / "small"
    ends = {"FAKE_EXIT": "tracker-0:2:no disk", "FAKE_STEP_S": "0.5"}  # it has to exit before the run ends
    done = grpo("run", file, "run.steps=8", "generator.count=1", "tracking.tensorboard=true", **ends)
    assert done.returncode == 0, done.stderr
    assert "tracker-0 failed with exit code 2: no disk; restarting tracker-0 in 60 s" in done.stdout
    assert steps(run) == list(range(8))
    assert log(run, "tracker-0").count("no disk") == 1
    off = grpo("run", file, "run.steps=8", "generator.count=1")  # the same run with or without a tracker
    assert (off.returncode, "has already finished" in off.stdout) == (0, True)


def test_a_missing_package_ends_the_command_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "shadow" / "wandb").mkdir(parents=True)  # a folder of that name is not a package
    file = config_file(tmp_path)
    command = [sys.executable, "-m", "services.console.commands", "run", str(file), "tracking.wandb=project"]
    environ = {**os.environ, "HOME": str(tmp_path), "WANDB_MODE": "online", "WANDB_API_KEY": ""}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "WANDB_MODE = online needs a key" in done.stderr
    assert not (tmp_path / "small" / "redis").exists()
