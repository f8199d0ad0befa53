"""Comparing two runs of the example: from which moment, at which rewards, and what happens to a run that does not match."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import end_to_end
from benchmarks.against_trl.curves import WINDOW, Curve, ratio, ratios, unreached
from benchmarks.against_trl.sides import TRIED, TRL, RunFailed, running
from benchmarks.suite.catalogue import SUITE

TARGETS = [0.5, 0.6, 0.7, 0.8]
RATES = [min(1.0, (step + 1) / 10) * 2e-4 for step in range(20)]


def run(step_s: float, best: float = 0.9, generating: float = 10.0, started: float = 100.0) -> Curve:
    """Return a run of twenty steps whose reward rises from 0.4 by 0.05 per step, up to `best`."""
    curve = Curve(started, generating, peak_mib=1000.0)
    for step, rate in enumerate(RATES):
        at = started + generating + (step + 1) * step_s
        curve.add(at, min(best, 0.4 + 0.05 * step), 1000, 900, completions=256, rate=rate)
    return curve


def test_the_clock_starts_at_the_first_completion_or_the_command() -> None:
    curve = run(2.0)
    # The mean of steps 0 to 4 is 0.5, and that of steps 2 to 6 is 0.6.
    assert (curve.reaches(0.5), curve.reaches(0.6)) == (pytest.approx(10), pytest.approx(14))
    assert (curve.reaches(0.5, "command"), curve.whole("command")) == (pytest.approx(20), pytest.approx(50))
    assert curve.smooth()[0] == (pytest.approx(20), pytest.approx(0.5))
    assert len(curve.smooth()) == len(RATES) - WINDOW + 1


def test_ratios_are_the_others_seconds_over_ours() -> None:
    slow, fast = run(3.0), run(2.0, generating=30.0)
    found = ratios("ratio", slow, fast, TARGETS)
    assert found == pytest.approx({"ratio": 1.5, "ratio_05": 1.5, "ratio_06": 1.5, "ratio_07": 1.5, "ratio_08": 1.5})
    # Measured from the command, the 20 s of loading weigh most where the target is near.
    found = ratios("from", slow, fast, TARGETS, "command")
    assert found["from_05"] == pytest.approx(25 / 40)
    assert found["from"] == found["from_05"] < found["from_08"]


def test_a_run_that_misses_a_target_is_named_and_never_favoured() -> None:
    high, low = run(2.0), run(2.0, best=0.7)
    assert ratio(low, high, 0.8) == pytest.approx(low.whole() / high.reaches(0.8))  # less than the whole run would have needed
    assert ratio(high, low, 0.8) == 0
    assert math.isnan(ratio(low, low, 0.8))
    assert unreached({"ours/0": high, "trl/0": low}, TARGETS) == {"0.8": ["trl/0"]}
    assert ratios("ratio", low, low, TARGETS)["ratio"] == pytest.approx(1)  # the minimum over those that exist


def test_runs_with_other_steps_completions_or_rates_are_rejected() -> None:
    assert not run(2.0).fault(20, 256, RATES)
    assert "20 steps instead of 25" in run(2.0).fault(25, 256, RATES)
    assert "256 completions instead of 128" in run(2.0).fault(20, 128, RATES)
    from_zero = [min(1.0, step / 10) * 2e-4 for step in range(20)]
    assert "learning rate 2e-05 instead of 0.0 in step 0" in run(2.0).fault(20, 256, from_zero)
    assert "first completion" in run(2.0, generating=math.nan).fault(20, 256, RATES)


def test_a_run_that_times_out_or_fails_is_reported(tmp_path: Path) -> None:
    def command(code: str) -> list[str]:
        return [sys.executable, "-c", code]

    endless = command("import time; time.sleep(600)")
    with pytest.raises(RunFailed, match=r"took longer than 0\.2 s"), running(endless, tmp_path / "log", 0.2):
        pass
    failing = command("import sys; sys.exit('no such model')")
    with pytest.raises(RunFailed, match="exit code 1: no such model"), running(failing, tmp_path / "log", 60):
        pass


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(
        results=tmp_path / "runs" / "all.json", steps=20, seeds=[0, 1], targets=TARGETS, limit_s=9.0, staleness=None, untried=True
    )


def test_a_stopped_comparison_resumes_and_tolerates_failures(
    monkeypatch: pytest.MonkeyPatch, options: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []

    def side(name: str, overrides: list[str], limit_s: float, settings: Any) -> Curve:
        done.append(f"{name} {overrides[1]}")
        if len(done) == 2:
            raise KeyboardInterrupt
        if name == "trl_vllm":
            raise RunFailed("no vLLM here")
        return run(2.0 if name == "ours" else 3.0)

    monkeypatch.setattr(end_to_end, "side", side)
    sides = ["trl", "ours", "trl_vllm"]
    with pytest.raises(KeyboardInterrupt):
        end_to_end.measure(options, sides)
    record = end_to_end.measure(options, sides)
    assert done == [
        "trl run.seed=0", "ours run.seed=0", "ours run.seed=0", "trl_vllm run.seed=0", "trl_vllm run.seed=1", "ours run.seed=1",
        "trl run.seed=1",
    ]  # fmt: skip
    capsys.readouterr()
    end_to_end.print_report(record, options, sides)
    line = json.loads(capsys.readouterr().out)
    assert (line["ratio_05"], line["ratio_08"], line["values"]["ratio_07"]) == (1.5, 1.5, [1.5, 1.5])
    assert line["failed"] == {"trl_vllm/0": "no vLLM here", "trl_vllm/1": "no vLLM here"}
    assert "trl_vllm_ratio_05" in line["missed"]
    assert not {"ratio_05", "ours.steps_per_s"} & set(line["missed"])
    record.end()
    assert options.results.exists(), "failed runs are retried"


def test_the_fastest_settings_are_compared_and_tried_once(monkeypatch: pytest.MonkeyPatch, options: argparse.Namespace) -> None:
    given: list[Any] = []

    def side(name: str, overrides: list[str], limit_s: float, settings: Any) -> Curve:
        given.append(settings)
        if settings.get("cache"):
            raise RunFailed("no static cache here")
        return run(2.0 if settings["threads"] == 1 else 3.0)

    monkeypatch.setattr(end_to_end, "side", side)
    options.untried, options.seeds = False, [0]
    record = end_to_end.measure(options, ["trl"])
    assert given == [{**TRL["trl"], **change} for change in TRIED["trl"]] + [{**TRL["trl"], "threads": 1}]
    assert record.tried["trl"]['{"cache": "static"}'] == 0
    assert len(end_to_end.measure(options, ["trl"]).curves) == 1
    assert len(given) == len(TRIED["trl"]) + 1


@pytest.mark.parametrize(("name", "bounds"), [("end_to_end", None), ("staleness", [0, 1, 2, 4])])
def test_every_figure_of_the_catalogue_is_reported(options: argparse.Namespace, name: str, bounds: list[int] | None) -> None:
    options.staleness = bounds
    sides = [f"staleness_{bound}" for bound in bounds] if bounds else ["ours", *TRL]
    figures = end_to_end.figures_of(dict.fromkeys(sides, run(2.0)), options)
    [benchmark] = [each for each in SUITE if each.name == name]
    assert {figure.key for figure in benchmark.figures} <= set(figures)


def test_runs_with_other_options_are_not_resumed(options: argparse.Namespace) -> None:
    first = end_to_end.Record(options.results, {"steps": 20})
    first.add("ours/0", run(2.0))
    assert end_to_end.Record(options.results, {"steps": 20}).curves == {"ours/0": run(2.0)}
    assert not end_to_end.Record(options.results, {"steps": 40}).curves
    first.end()
    assert not options.results.exists()
