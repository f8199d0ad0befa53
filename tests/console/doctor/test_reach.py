"""`grpo doctor --listen` and `--reach`: two real processes, a real collective, and the report if it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.console.__main__ import main
from services.console.doctor.reach import check
from tests.support.harness import small_config


def test_two_machines_run_a_collective(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_config(tmp_path)
    file, host = str(tmp_path / "run.toml"), "sync.host=127.0.0.1"
    command = [sys.executable, "-m", "services.console", "doctor", file, host, "--listen", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None
        assert listener.stderr is not None
        try:
            place = listener.stderr.readline().split()[-1]
            assert main(["doctor", file, host, "--reach", place]) == 0
            theirs = json.loads(listener.stdout.read())
            assert listener.wait(60) == 0
        finally:
            listener.kill()
    ours = capsys.readouterr().out
    assert "these two machines can sync weights" in ours
    assert f"met at {place}" in " ".join(ours.split())
    assert [(one["what"], one["state"]) for one in theirs["findings"]] == [("network: meeting", "ok"), ("network: gloo", "ok")]
    assert "all-reduce of 16 MiB" in theirs["findings"][1]["detail"]


def test_missing_peers_are_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(tmp_path, None, "sync.join_deadline_s=1.0", "sync.host=127.0.0.1")
    (lonely,) = check(config, "", wait_s=0.2)
    assert (lonely.state, "no machine connected within 0.2 s" in lonely.detail) == ("fault", True)
    assert "--reach 127.0.0.1:" in capsys.readouterr().err
    (refused,) = check(config, "127.0.0.1:1")
    assert (refused.what, refused.state) == ("network: meeting", "fault")
    assert "sync.host" in refused.remedy


def test_missing_torch_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (found,) = check(small_config(tmp_path), "127.0.0.1:1")
    assert (found.what, found.state) == ("torch", "fault")
    assert "grpo[trainer]" in found.remedy


def test_conflicting_or_malformed_options_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_config(tmp_path)
    assert main(["doctor", str(tmp_path / "run.toml"), "--listen", "--reach", "here:1"]) == 2
    assert main(["doctor", str(tmp_path / "run.toml"), "--reach", "here"]) == 2
    assert "give HOST:PORT" in capsys.readouterr().err
