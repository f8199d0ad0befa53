"""Checkpoints of a whole run: requested by command and over REST, a read-only disk, SIGTERM in the middle of a step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from services.operations.history import recorded
from services.runtime.checkpoints import CheckpointFolder
from tests.support.console import ROOT
from tests.support.harness import save_model_folder
from tests.support.whole_runs import finish, pids_of, start, steps_done, wait_for, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NAME = "kept"
KEPT = ("checkpoint.every_steps=2", "checkpoint.keep=2", "filters.exclude_pass_rate=0")  # so that prompts do not run out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save_model_folder(folder / "model")
    return folder


@pytest.fixture
def process(folder: Path) -> subprocess.Popen[str]:
    """Start a run that continues until it is stopped, with a checkpoint after every other step."""
    process = start(write_run(folder, NAME, "run.steps=1000", *KEPT))
    wait_for(lambda: steps_done(folder, NAME) >= 2, process)
    return process


def grpo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.console.commands", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def ask(folder: Path, path: str, token: str = "", post: bool = False) -> Any:
    """Return the trainer's response, using its address in the fleet."""
    pods: list[Any] = []
    deadline = time.monotonic() + 60
    while not pods and time.monotonic() < deadline:  # a heartbeat may be late
        there = json.loads(grpo("status", str(folder / NAME), "--json").stdout)["pods"]
        pods = [pod for pod in there if pod["kind"] == "trainer"]
    (pod,) = pods
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(pod["url"] + path, headers=headers, method="POST" if post else "GET")
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


def record(folder: Path) -> dict[str, float]:
    *_, last = recorded(folder / NAME / "metrics.jsonl")
    return last


def test_checkpoints_of_a_whole_run(folder: Path, process: subprocess.Popen[str]) -> None:
    """Uses one run for all cases, as starting takes longer than the cases."""
    root = folder / NAME / "checkpoints"
    written = CheckpointFolder(root)

    done = grpo("checkpoint", str(folder / NAME), "--wait")
    assert done.returncode == 0, done.stderr
    step = int(done.stdout.split("checkpoint of step ")[1].split()[0])
    assert done.stdout == f"run {NAME}: checkpoint of step {step} written\n"

    api = tomllib.loads((folder / NAME / "config.toml").read_text())["api"]
    token, read_token = (Path(api[name]).read_text() for name in ("token_file", "read_token_file"))
    with pytest.raises(urllib.error.HTTPError, match="403"):
        ask(folder, "/v1/checkpoint", read_token, post=True)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(folder, "/v1/checkpoint", post=True)
    reply = ask(folder, "/v1/checkpoint", token, post=True)
    assert reply["step"] >= step
    wait_for(lambda: any(saved.step >= reply["step"] for saved in written.complete()), process)
    listed = ask(folder, "/v1/checkpoints", read_token)
    assert listed["keep"] == 2
    assert 1 <= len([one for one in listed["checkpoints"] if one["complete"]]) <= 3
    assert {one["ranks"] for one in listed["checkpoints"] if one["complete"]} == {1}
    done = grpo("checkpoints", str(folder / NAME), "--json")
    assert done.returncode == 0, done.stderr
    assert all(one["bytes"] > 0 for one in json.loads(done.stdout)["checkpoints"] if one["complete"])

    refused = _seal(root)
    if not refused:
        try:
            wait_for(lambda: record(folder)["checkpoint/failed"] >= 1, process)
            before = {saved.step for saved in written.complete()}
            done = grpo("checkpoint", str(folder / NAME), "--wait")
            assert done.returncode == 1
            assert "Read-only file system; make it writable for this user, or set run.dir" in done.stderr
            assert {saved.step for saved in written.complete()} == before
            assert "checkpoint not written: step" in grpo("status", str(folder / NAME)).stdout
        finally:
            subprocess.run(["umount", "--lazy", root], capture_output=True, check=False)
        wait_for(lambda: record(folder)["checkpoint/failed"] == 0, process)
        assert {saved.step for saved in written.complete()} - before

    seen = steps_done(folder, NAME)
    wait_for(lambda: steps_done(folder, NAME) > seen, process)
    process.send_signal(signal.SIGTERM)  # most likely in the middle of a step
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 130, output
    state = json.loads(grpo("status", str(folder / NAME), "--json").stdout)["state"]
    assert state["committed_step"] == state["checkpointed_step"] == written.at(state["committed_step"]).step
    assert steps_done(folder, NAME) == state["committed_step"] + 1
    assert not written.unfinished()
    assert len(written.complete()) == 2
    done = grpo("checkpoints", str(folder / NAME), "--verify", "--json")
    assert done.returncode == 0, done.stdout
    assert [(one["problem"], one["latest"]) for one in json.loads(done.stdout)["checkpoints"]] == [("", False), ("", True)]
    _goes_on_with_two_ranks(folder, state["committed_step"])
    _forks(folder)
    if refused:
        pytest.skip(f"all but the disk that refuses: nothing can be mounted here: {refused}")


def _goes_on_with_two_ranks(folder: Path, step: int) -> None:
    """Resume a run of one rank at ZeRO stage 0 with two ranks at stage 3, and terminate the second as when its pod is evicted."""
    path = write_run(folder, NAME, "run.steps=1000", *KEPT, "trainer.ranks=2", "trainer.zero_stage=3")
    process = start(path)
    written = CheckpointFolder(folder / NAME / "checkpoints")
    wait_for(lambda: written.complete()[-1].step > step + 1, process)
    (second,) = pids_of(folder, NAME, "trainer-1")
    os.kill(second, signal.SIGTERM)
    wait_for(lambda: second not in pids_of(folder, NAME, "trainer-1"), process)
    saved = written.complete()[-1].step
    wait_for(lambda: written.complete()[-1].step > saved, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 130, output
    facts = written.complete()[-1].manifest.facts
    assert (facts["ranks"], facts["zero_stage"]) == (2, 3)
    assert "0 tickets lost, 0 duplicated" in output
    assert [line for line in output.splitlines() if "retrained" in line] == []
    assert "stopped" in output


def _forks(folder: Path) -> None:
    """Fork a run from a checkpoint with another group size and loss; the original stays unchanged."""
    before = sorted(path.name for path in (folder / NAME / "checkpoints").iterdir())
    step = CheckpointFolder(folder / NAME / "checkpoints").complete()[0].step
    settings = ("run.name=forked", f"run.steps={step + 4}", "sampling.group_size=2", "loss.policy=dapo", "trainer.ranks=1")
    done = subprocess.run(
        [sys.executable, "-m", "services.console.commands", "fork", str(folder / NAME), "--at", str(step), *settings, "--json"],
        capture_output=True, text=True, cwd=folder, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reply = json.loads(done.stdout)
    assert (reply["step"], reply["changes"]["sampling.group_size"]) == (step, [4, 2])
    output = finish(start(folder / "forked.toml"))
    assert "(from its checkpoint)" in output
    assert f"restored from checkpoint {step}" in output
    assert "0 tickets lost, 0 duplicated, 0 dropped" in output
    assert steps_done(folder, "forked") == step + 4, "the curve starts where that of the original did"
    assert sorted(path.name for path in (folder / NAME / "checkpoints").iterdir()) == before


def _seal(root: Path) -> str:
    """Make a folder read-only, even for root. Return why that is impossible, or an empty string."""
    for options in (["--bind", root, root], ["-o", "remount,bind,ro", root]):
        done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
        if done.returncode:
            subprocess.run(["umount", "--lazy", root], capture_output=True, check=False)
            return done.stderr.strip() or f"mount exits with {done.returncode}"
        time.sleep(0.1)
    return ""
