"""The benchmark suite: what it records, compares and shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite.__main__ import chosen, compared, measure, record, recorded, worse
from benchmarks.suite.catalogue import BUDGET_S, COUNTED, SUITE, Benchmark, Figure
from benchmarks.suite.fitting import growth, power_law, relative
from benchmarks.suite.page import write_page

ROOT = Path(__file__).parent.parent
BESIDE = ("reuse", "fleet")
"""Benchmarks outside the suite: one takes half an hour, and one is part of `growth`."""
REPORTS = re.compile(r"from benchmarks\.common import .*\breport\b")
MACHINE = {"cpu": "a processor", "cores": 2, "memory_gib": 24.0, "load": [0.1, 0.1, 0.1]}


def result(**values: float) -> dict[str, Any]:
    return {
        **values,
        "spread": {key: [0.9 * value, 1.1 * value] for key, value in values.items()},
        "repeats": 3,
        "seconds": 12,
        "machine": MACHINE,
    }


def test_every_benchmark_is_in_the_suite_and_exists() -> None:
    run = {benchmark.command[1].removeprefix("benchmarks.") for benchmark in SUITE}
    measuring = {
        path.parent.name if path.stem == "__main__" else path.stem
        for path in (ROOT / "benchmarks").rglob("*.py")
        if REPORTS.search(path.read_text()) and path.stem not in BESIDE
    }
    assert run == measuring


def test_the_suite_fits_its_budget_and_every_goal_explains_gaps() -> None:
    assert sum(benchmark.planned_s for benchmark in SUITE) <= BUDGET_S
    for benchmark in SUITE:
        keys = [figure.key for figure in benchmark.figures]
        assert len(set(keys)) == len(keys), benchmark.name
        assert benchmark.gap or all(figure.goal is None for figure in benchmark.figures), benchmark.name


def test_a_failed_or_incomplete_benchmark_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = tmp_path / "benchmarks" / "said.py"
    said.parent.mkdir()
    monkeypatch.setattr("benchmarks.suite.__main__.ROOT", tmp_path)
    here = Benchmark("said", "", "", 10, (Figure("ratio", ""), Figure("never", "")))
    said.write_text("""print('greeting'); print('{"ratio": 1, "missed": ["never"]}')""")
    assert measure(here)["ratio"] == 1
    said.write_text("""print('{"ratio": 1}')""")
    with pytest.raises(RuntimeError, match="does not report never"):
        measure(here)
    said.write_text("raise SystemExit('out of luck')")
    with pytest.raises(RuntimeError, match="exit code 1: out of luck"):
        measure(here)


def test_counted_figures_have_tighter_tolerances_than_timed_ones() -> None:
    here = Benchmark("x", "", "", 1, (Figure("calls", "", better="lower", tolerance=COUNTED), Figure("ratio", "")))
    before = {"x": {**result(calls=10.0, ratio=1.0), "date": "2026-01-01"}}
    before["x"]["spread"] = {"calls": [9.9, 10.1], "ratio": [0.9, 1.1]}
    assert not compared(here, before, result(calls=10.4, ratio=0.8))
    assert [said.split()[0] for said in compared(here, before, result(calls=11.0, ratio=0.7))] == ["calls", "ratio"]
    assert "suite run x" in compared(here, {}, result(calls=10.0, ratio=1.0))[0]


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_law_is_estimated_with_its_error(exponent: float) -> None:
    exact = {size: [3.0 * size**exponent] * 2 for size in (1, 10, 100, 1000)}
    assert power_law(exact) == pytest.approx([exponent] * 3, abs=1e-9)
    noisy = {size: [cost * factor for cost, factor in zip(of, (0.8, 1.25), strict=True)] for size, of in exact.items()}
    low, found, high = power_law(noisy)
    assert found == pytest.approx(exponent)
    # By hand: every sample is ln 1.25 off, 6 degrees of freedom, squared distances of the sizes 10 (ln 10)^2.
    assert high - found == pytest.approx(found - low) == pytest.approx(2 * (8 * 0.22314**2 / 6 / (10 * 2.302585**2)) ** 0.5, 1e-4)
    assert growth(noisy) == pytest.approx([1000**exponent * factor for factor in (0.8 / 1.25, 1, 1.25 / 0.8)])
    assert relative(exact)[0] == (1, 1)
    assert relative(exact)[-1] == pytest.approx((1000, 1000**exponent), rel=1e-4)


def test_an_exponent_from_too_few_points_is_rejected() -> None:
    with pytest.raises(ValueError, match="3 of 1"):
        power_law({10: [1.0, 2.0, 3.0]})
    with pytest.raises(ValueError, match="2 of 2"):
        power_law({1: [1.0], 10: [2.0]})


def test_later_figures_replace_earlier_ones(tmp_path: Path) -> None:
    record({"datapath": result(ratio=0.5), "stream": result(ratio=9.0)}, tmp_path)
    path = record({"datapath": result(ratio=0.6)}, tmp_path)
    (tmp_path / "2020-01-01.json").write_text('{"datapath": {"ratio": 0.1}, "sync": {"x": 1}}')
    found = recorded(tmp_path)
    assert (found["datapath"]["ratio"], found["stream"]["ratio"], found["sync"]["x"]) == (0.6, 9.0, 1)
    assert found["datapath"]["date"] == path.stem


@pytest.mark.parametrize(
    ("better", "value", "bad"),
    [("higher", 0.74, True), ("higher", 0.76, False), ("higher", 3.0, False), ("lower", 1.26, True), ("lower", 0.2, False)],
)
def test_a_ratio_is_worse_beyond_spread_and_tolerance(better: Any, value: float, bad: bool) -> None:
    before = {**result(ratio=1.0), "date": "2026-01-01"}
    assert bool(worse(Figure("ratio", "", better=better), before, result(ratio=value))) == bad
    assert not worse(Figure("ratio", "", better=better, ratio=False), before, result(ratio=100 * value))
    assert "missing" in worse(Figure("ratio", "", better=better), before, {})


def test_the_page_shows_missed_goals_and_missing_figures(tmp_path: Path) -> None:
    datapath = {**result(ratio=0.3, dataprep_us_per_group=120.0), "date": "2026-01-01"}
    ends = {**result(ratio_05=2.0), "date": "2026-01-02", "curves": {"ours, seed 0": [[0, 0.1], [5, 0.7]]}}
    recovery = {**result(astray=0.0), "date": "2026-01-02"}
    results = {"datapath": datapath, "end_to_end": ends, "recovery": recovery}
    write_page(results, tmp_path / "benchmarks.md")
    page = (tmp_path / "benchmarks.md").read_text()
    missed = page.partition("## Goals missed")[2].partition("##")[0]
    assert "The data path" in missed
    assert "0.3, goal ≥ 0.4. Each group" in missed
    assert missed.count("\n- ") == 1
    assert "| 0.3 (0.27 to 0.33) | ≥ 0.4 |" in page
    assert "Not recorded yet: staleness," in page
    for plot in re.findall(r"\((benchmarks/\w+\.svg)\)", page):
        assert "</svg>" in (tmp_path / plot).read_text()
    assert "ours, seed 0" in (tmp_path / "benchmarks" / "end_to_end.svg").read_text()
    before = (tmp_path / "benchmarks" / "goals.svg").read_bytes()
    write_page(results, tmp_path / "benchmarks.md")
    assert (tmp_path / "benchmarks" / "goals.svg").read_bytes() == before


def test_an_unknown_name_is_rejected() -> None:
    with pytest.raises(SystemExit, match="no benchmark is called 'x'"):
        chosen(["x"])


def test_the_readme_has_the_recorded_figures_against_trl() -> None:
    found, readme = recorded()["end_to_end"], (ROOT / "README.md").read_text()
    peers = ("", "trl_vllm_", "trl_async_")
    to_rewards = "; ".join(
        ", ".join(f"{found[f'{peer}ratio_{reward}']:.2f}" for reward in ("05", "06", "07", "08")) for peer in peers
    )
    from_command, steps_per_s = (
        "; ".join(f"{found[peer + key]:.2f}" for peer in peers) for key in ("from_command_ratio", "steps_per_s_ratio")
    )
    for figures in (to_rewards, from_command, steps_per_s):
        assert f"| {figures} |" in readme
