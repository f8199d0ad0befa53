"""Prepares the charted metrics: one row of numbers per step, reduced to the number of points that a chart can show. Pure.

Guarantees: a missing or non-finite value is None. A point for several steps shows their mean or, for a metric that is itself a
maximum, their maximum.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

CHARTED = (
    "time_s", "reward/train/mean", "reward/train/std", "reward/gen/mean", "reward/train/zero_std_share",
    "staleness/trained/mean", "staleness/trained/max", "throughput/generated/tokens_per_s", "throughput/trained/tokens_per_s",
    "length/train/mean", "length/gen/mean", "tokens/train/sum", "entropy/train/mean", "logprob_gap/train/mean",
    "gradient/train/norm", "replay/buffer/groups", "fleet/generators", "time/elapsed_s", "time/train_s", "time/sync_s",
    "time/wait_s", "time/transfer_s", "sync/attempts", "sync/share", "sync/changed", "checkpoint/failed", "loss/train/sum",
    "kl/train/mean", "clip_low/train/fraction", "clip_high/train/fraction", "solve_rate/train/0", "solve_rate/train/100",
    "mfu/train/compute", "turns/train/mean", "tool_calls/train/mean", "malformed_calls/train/mean",
)  # fmt: skip
"""Metrics kept of every step (docs/metrics.md): about 300 bytes per step in memory."""
LARGEST = frozenset({"staleness/trained/max", "sync/attempts", "checkpoint/failed"})
MOST_POINTS = 2000


def keep(record: Mapping[str, Any]) -> array[float]:
    """Return the charted metrics of a step's record; NaN for missing ones, and for what is not a number."""
    return array("d", (_number(record.get(key)) for key in CHARTED))


def _number(value: object) -> float:
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


def plain(row: Iterable[float]) -> list[float | None]:
    """Return numbers for JSON, with None for non-finite ones."""
    return [value if math.isfinite(value) else None for value in row]


def drawn(rows: Mapping[int, array[float]], points: int) -> tuple[list[int], dict[str, list[float | None]]]:
    """Return steps and columns with at most `points` points. A point for several steps is placed at the last of them."""
    steps = sorted(rows)
    if not steps:
        return [], {key: [] for key in CHARTED}
    width = max(1, math.ceil(len(steps) / max(1, points)))
    table = np.frombuffer(b"".join(rows[step] for step in steps)).reshape(len(steps), len(CHARTED))  # [steps, metrics]
    table = np.pad(table, ((0, -len(steps) % width), (0, 0)), constant_values=np.nan).reshape(-1, width, len(CHARTED))
    known = np.isfinite(table)
    with np.errstate(invalid="ignore"):  # a point without values has the mean 0 / 0 and no maximum
        mean = np.where(known, table, 0.0).sum(1) / known.sum(1)
    largest = np.where(known, table, -np.inf).max(1)
    shown = np.where([key in LARGEST for key in CHARTED], largest, mean)
    columns = {key: plain(column) for key, column in zip(CHARTED, shown.T.tolist(), strict=True)}
    return [*steps[width - 1 : -1 : width], steps[-1]], columns
