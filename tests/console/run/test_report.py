"""The report image, drawn from whatever metrics are available."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from services.console.run import report

PNG = b"\x89PNG\r\n\x1a\n"


SUMMARY = {
    "run": "demo", "model": "build/arithmetic", "generators": 2, "wall_s": 187.0, "status": "finished", "max_staleness": 1,
    "reward_first": 0.036, "reward_last": 0.756,
}  # fmt: skip


def full_row(step: int) -> dict[str, float]:
    return {
        "step": step,
        "time_s": 1.7e9 + step,
        "reward/train/mean": 0.3 + 0.01 * step,
        "staleness/trained/mean": 0.8,
        "staleness/trained/max": 1.0,
        "throughput/generated/tokens_per_s": 2500.0,
        "throughput/trained/tokens_per_s": 2400.0,
        "length/train/mean": 17.0,
    }


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [full_row(0)],
        [full_row(step) for step in range(40)],
        [{"step": 0, "time_s": 1.0}, {"step": 1, "time_s": 2.0}],
        [full_row(step) if step % 3 else {"step": step} for step in range(12)],
    ],
    ids=["no step", "one step", "forty steps", "no metric", "gaps"],
)
def test_any_metrics_file_gives_an_image(rows: list[dict[str, float]], tmp_path: Path) -> None:
    out = tmp_path / "report.png"
    report.write_report(rows, SUMMARY, out)
    assert out.read_bytes().startswith(PNG)
    assert [path.name for path in tmp_path.iterdir()] == ["report.png"]


def test_the_title_and_the_subtitle_are_of_the_summary() -> None:
    rows = [{"step": step} for step in range(11)]
    assert report.title(rows, SUMMARY) == "demo · 11 steps · reward 0.04 → 0.76"
    assert report.title(rows[:1], SUMMARY | {"reward_first": None}) == "demo · 1 step"
    ends = "rewards above: means of the first and last 5 steps"
    assert report.subtitle(rows, SUMMARY) == f"build/arithmetic · 2 generators · 3:07 · finished · {ends}"
    assert report.subtitle([], SUMMARY | {"generators": 1}) == "build/arithmetic · 1 generator · 3:07 · finished"


def test_smoothing_matches_hand_computed_values() -> None:
    values = np.array([1.0, 2.0, np.nan, 6.0])
    assert report.smooth(values, 3).tolist() == [1.5, 1.5, 4.0, 6.0]
    assert report.smooth(np.array([3.0, 5.0]), 1).tolist() == [3.0, 5.0]
    assert np.isnan(report.smooth(np.array([np.nan, np.nan]), 3)).all()


def test_smoothing_matches_a_naive_implementation() -> None:
    values = np.random.default_rng(0).normal(size=37)
    for span in (1, 3, 7, 15):
        half = span // 2
        slow = [values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))]
        np.testing.assert_allclose(report.smooth(values, span), slow, atol=1e-12)
