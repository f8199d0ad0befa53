"""The data of the page's charts."""

from __future__ import annotations

import math

from services.web.series import CHARTED, drawn, keep


def test_a_run_of_any_length_is_downsampled() -> None:
    for count, points in ((0, 5), (1, 5), (4, 5), (5, 5), (6, 5), (11, 5), (1000, 400), (7, 1)):
        rows = {step: keep({"reward/train/mean": float(step), "staleness/trained/max": float(step)}) for step in range(count)}
        steps, columns = drawn(rows, points)
        assert len(steps) <= points
        assert steps == sorted(set(steps))
        assert steps[-1:] == ([count - 1] if count else [])
        assert {len(column) for column in columns.values()} == {len(steps)}
        if count:
            firsts = [0, *(step + 1 for step in steps[:-1])]
            means = [sum(range(first, last + 1)) / (last + 1 - first) for first, last in zip(firsts, steps, strict=True)]
            assert columns["reward/train/mean"] == means
            assert columns["staleness/trained/max"] == steps


def test_missing_and_nonfinite_values_are_gaps() -> None:
    times = [{"time/elapsed_s": seconds} for seconds in (math.nan, 2.0, math.inf)]
    rows = {step: keep(record) for step, record in enumerate([*times, {}])}
    assert drawn(rows, 9)[1]["time/elapsed_s"] == [None, 2.0, None, None]
    assert drawn(rows, 2)[1]["time/elapsed_s"] == [2.0, None]
    assert drawn({}, 9) == ([], {key: [] for key in CHARTED})
