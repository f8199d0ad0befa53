"""`grpo compare` shows two runs side by side from their folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.config import load, to_toml
from services.console.commands.__main__ import main
from tests.support.harness import small_config


def made(folder: Path, name: str, rate: float, *overrides: str) -> Path:
    small_config(folder)
    run = folder / name
    run.mkdir()
    (run / "config.toml").write_text(to_toml(load(folder / "run.toml", [f"run.name={name}", *overrides], environ={})))
    lines = [{"step": step, "reward/train/mean": rate * step, "time/elapsed_s": 1.0} for step in range(40)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 40, "rew')
    (run / "evaluations.jsonl").write_text(json.dumps({"eval/version": 40, "eval/main/pass@1": rate}) + "\n")
    return run


def test_configurations_curves_and_evaluations_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = made(tmp_path, "slow", 0.01), made(tmp_path, "fast", 0.02, "optimizer.learning_rate=3e-5")
    assert main(["compare", str(slow), str(fast), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == ["slow", "fast"]
    assert list(found["configuration"]) == ["optimizer.learning_rate"]
    assert found["configuration"]["optimizer.learning_rate"][1] == 3e-5
    assert found["steps"] == [40, 40]
    assert found["curves"]["reward/train/mean"][1]["10"] == pytest.approx(0.2)
    assert found["evaluation"] == {"eval/main/pass@1": [0.01, 0.02]}
    assert main(["compare", str(slow), str(fast), "--metric", "reward/train/mean"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [curve] = [line for line in lines if line.startswith("reward/train/mean")]
    assert curve.split()[2::2] == ["0.375", "0.75"]
    assert curve.split()[3][-1] == "█", "both curves share a scale"
    assert not any("time/elapsed_s" in line for line in lines)


def test_a_run_without_steps_is_compared_and_a_missing_one_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = made(tmp_path, "one", 0.01)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        (one / name).unlink()
    assert main(["compare", str(one), str(one)]) == 0
    assert "the configurations are equal" in capsys.readouterr().out
    assert main(["compare", str(one), "no-such-run"]) == 2
    assert "no run 'no-such-run' found" in capsys.readouterr().err
