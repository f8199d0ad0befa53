"""Formats numbers for people, computes figures from the steps' metrics, and gives these the field's common names. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

REWARD = "reward/train/mean"
LAG_MEAN, LAG_MAX = "staleness/trained/mean", "staleness/trained/max"
GENERATED, TRAINED = "throughput/generated/tokens_per_s", "throughput/trained/tokens_per_s"
LENGTH, STEP_S = "length/train/mean", "time/elapsed_s"
NOTHING = "–"  # shown for a missing value
RECENT_STEPS = 20  # steps from which the time left is estimated

SAME = {
    "reward/mean": "reward/train/mean",
    "reward/std": "reward/train/std",
    "frac_reward_zero_std": "reward/train/zero_std_share",
    "completions/mean_length": "length/train/mean",
    "completions/min_length": "length/train/min",
    "completions/max_length": "length/train/max",
    "kl": "kl/train/mean",
    "entropy": "entropy/train/mean",
    "grad_norm": "gradient/train/norm",
    "learning_rate": "learning_rate/train/value",
}
"""Name of the field -> ours."""
DERIVED = {
    "completions/clipped_ratio": "1 − `length/train/stop_share`",
    "clip_ratio": "`clip_low/train/fraction` + `clip_high/train/fraction`",
}
"""Name of the field -> how it is computed from ours."""


def number(row: Mapping[str, float], key: str, form: str = ".2f") -> str:
    """Format a value of a step with Python's format `form`; return a dash if it is missing."""
    value = row.get(key)
    return NOTHING if value is None else format(value, form)


def duration(seconds: float | None) -> str:
    """Format a duration as 4.2 s, 3:07 or 2:03:07."""
    if seconds is None:
        return NOTHING
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest} s"


def left_s(rows: Sequence[Mapping[str, float]], steps: int) -> float | None:
    """Estimate the seconds to the last step from the last `RECENT_STEPS`; None before two steps are known."""
    times = [row["time_s"] for row in rows[-RECENT_STEPS - 1 :] if "time_s" in row]
    spans = _without_pauses([later - earlier for earlier, later in pairwise(times)])
    return max(0.0, sum(spans) / len(spans) * (steps - 1 - rows[-1]["step"])) if spans else None


def average_rate(rows: Sequence[Mapping[str, float]], key: str) -> float | None:
    """Return the mean of a rate over the run's time, each step weighted by the time since the previous one."""
    timed = [row for row in rows if "time_s" in row]
    spans = [(later["time_s"] - earlier["time_s"], later[key]) for earlier, later in pairwise(timed) if key in later]
    if not spans:
        return next((row[key] for row in rows if key in row), None)
    weights = _without_pauses([span for span, _ in spans])
    total = sum(weights)
    return sum(weight * rate for weight, (_, rate) in zip(weights, spans, strict=True)) / total if total else spans[-1][1]


def _without_pauses(spans: Sequence[float]) -> list[float]:
    """Return times between steps, each at most ten times the median: a long pause, such as a stop overnight, would dominate."""
    limit_s = 10 * sorted(spans)[len(spans) // 2] if spans else 0.0
    return [min(max(span, 0.0), limit_s) for span in spans]


def evaluation_line(record: Mapping[str, float]) -> str:
    """Return an evaluation round as one line: pass@k of every source."""
    passed = [(key.removeprefix("eval/"), value) for key, value in sorted(record.items()) if "/pass@" in key]
    shown = "  ".join(f"{name.replace('/', ' ')} {value:.3f}" for name, value in passed if not name.startswith("all/"))
    return f"evaluation of version {record['eval/version']:.0f}: {shown}  took {duration(record.get('eval/wall_s'))}"


def prompts_failed(count: int) -> str:
    """Return a line on prompts whose groups failed for good, so that no step trains on them."""
    return f"{count:,} prompt{'s' if count > 1 else ''} failed and will not be trained on (see grpo inspect deadletter)"


def step_line(row: Mapping[str, float], steps: int, left: float | None) -> str:
    """Return a step as one line, for a log or a pipe: its number, and how many of the run's `steps` are trained with it."""
    return (
        f"step {int(row['step'])} ({int(row['step']) + 1}/{steps})  reward {number(row, REWARD, '.3f')}  "
        f"lag {number(row, LAG_MEAN)} (max {number(row, LAG_MAX, '.0f')})  generated {number(row, GENERATED, ',.0f')} tok/s  "
        f"trained {number(row, TRAINED, ',.0f')} tok/s  length {number(row, LENGTH, '.1f')}  "
        f"took {duration(row.get(STEP_S))}  left {duration(left)}"
    )


def aliases(record: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a step under the field's names; one that the step lacks has no other name either."""
    found = {name: record[ours] for name, ours in SAME.items() if ours in record}
    if (stopped := record.get("length/train/stop_share")) is not None:
        found["completions/clipped_ratio"] = 1.0 - stopped
    clipped = [record[key] for key in ("clip_low/train/fraction", "clip_high/train/fraction") if key in record]
    if clipped:
        found["clip_ratio"] = sum(clipped)
    return found
