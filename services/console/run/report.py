"""Draws `report.png`: reward, staleness, throughput and completion length over the steps of a run.

Guarantees: a step or key missing from `metrics.jsonl` leaves a gap or a note in its panel, never an error; the file is written
atomically.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from services.console.run.summary import ENDS, ends_of
from services.operations.figures import GENERATED, LAG_MAX, LAG_MEAN, LENGTH, REWARD, TRAINED, duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

# Colours that colour-blind readers can tell apart, also in grey print (after Okabe and Ito, slightly darkened).
BLUE, ORANGE, GREEN, GREY, INK = "#1f6fb4", "#d9822b", "#2a8c6d", "#9aa3ad", "#2b2f36"


def write_report(metrics_path: Path, summary: Mapping[str, Any], out: Path) -> None:
    """Draw `out` (PNG) from `metrics_path`, which holds one JSON object per step.

    It uses these keys of `summary` if present: `run` (title), `model`, `generators`, `wall_s`, `status` (subtitle) and
    `max_staleness` (line of the bound).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_rows(metrics_path)
    steps = np.array([row["step"] for row in rows], dtype=float)
    figure = Figure(figsize=(12, 7.4), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2, sharex=True)
    _reward(panels[0][0], steps, _column(rows, REWARD))
    _staleness(panels[0][1], steps, _column(rows, LAG_MEAN), _column(rows, LAG_MAX), summary.get("max_staleness"))
    _throughput(panels[1][0], steps, _column(rows, GENERATED), _column(rows, TRAINED))
    _length(panels[1][1], steps, _column(rows, LENGTH))
    for panel in panels.flat:
        _calm(panel)
    if len(steps):
        margin = max(0.5, 0.02 * len(steps))  # half a step, so that a single step is centred
        panels[0][0].set_xlim(steps[0] - margin, steps[-1] + margin)
    for panel in panels[1]:
        panel.set_xlabel("training step", color=INK)
    figure.text(0.062, 0.955, title(rows, summary), fontsize=16, fontweight="bold", color=INK)
    figure.text(0.062, 0.922, subtitle(rows, summary), fontsize=10.5, color="#6b7480")
    figure.subplots_adjust(left=0.062, right=0.975, top=0.855, bottom=0.075, wspace=0.16, hspace=0.24)
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    figure.savefig(temporary, format="png")
    temporary.replace(out)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the steps of `metrics.jsonl` in order. The last record of a repeated step counts; torn lines are skipped."""
    rows: dict[int, dict[str, Any]] = {}
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            row = msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int | float):
            rows[int(row["step"])] = row
    return [rows[step] for step in sorted(rows)]


def title(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    """Return the run's name, its steps, and the first and last reward, each a mean over several steps."""
    head = f"{summary.get('run', 'run')} · {len(rows)} step{'' if len(rows) == 1 else 's'}"
    rewards = _column(rows, REWARD)
    if rewards is None:
        return head
    rewards = rewards[np.isfinite(rewards)]
    ends = ends_of(len(rewards))
    return f"{head} · reward {rewards[:ends].mean():.2f} → {rewards[-ends:].mean():.2f}"


def subtitle(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    """Return the model, generators, duration and status, as far as known."""
    parts = [str(summary["model"])] if summary.get("model") else []
    if generators := summary.get("generators"):
        parts.append(f"{generators} generator{'' if generators == 1 else 's'}")
    if (seconds := summary.get("wall_s")) is not None:
        parts.append(duration(seconds))
    if summary.get("status"):
        parts.append(str(summary["status"]))
    if len(rows) > ENDS and _column(rows, REWARD) is not None:
        parts.append(f"rewards above: means of the first and last {ends_of(len(rows))} steps")
    return " · ".join(parts)


def smooth(values: np.ndarray, span: int) -> np.ndarray:
    """Return the centred moving average [n] of finite values over `span` steps, shorter at the ends; NaN where none is finite."""
    known = np.isfinite(values)
    window = np.ones(span)
    total = np.convolve(np.where(known, values, 0.0), window, mode="full")
    count = np.convolve(known.astype(float), window, mode="full")
    start = (span - 1) // 2
    total, count = total[start : start + len(values)], np.rint(count[start : start + len(values)])
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)


def _column(rows: Sequence[Mapping[str, Any]], key: str) -> np.ndarray | None:
    """Return the values of a key as floats [n], NaN where a step lacks it; None if all steps do."""
    values = np.array([float(v) if isinstance(v := row.get(key), int | float) else np.nan for row in rows])
    return values if np.isfinite(values).any() else None


def _span(steps: np.ndarray) -> int:
    return max(1, min(15, len(steps) // 6) | 1)


def _marker(steps: np.ndarray) -> str:
    """Return the marker: dots for few steps, because a line through one point is invisible."""
    return "o" if len(steps) < 6 else ""


def _reward(panel: Axes, steps: np.ndarray, rewards: np.ndarray | None) -> None:
    _head(panel, "Reward", "mean of the trained completions")
    if rewards is None:
        return _missing(panel, REWARD)
    span = _span(steps)
    if span > 1:
        panel.plot(steps, rewards, color=BLUE, alpha=0.32, linewidth=1.0, label="each step")
    label = f"mean of {span} steps" if span > 1 else "each step"
    panel.plot(steps, smooth(rewards, span), color=BLUE, linewidth=2.2, marker=_marker(steps), label=label)
    if np.nanmin(rewards) >= 0 and np.nanmax(rewards) <= 1:
        panel.set_ylim(0, 1.02)
    return _legend(panel, "lower right")


def _staleness(panel: Axes, steps: np.ndarray, mean: np.ndarray | None, largest: np.ndarray | None, bound: Any) -> None:
    _head(panel, "Staleness", "lag of the trained rollouts, in steps")
    if mean is None and largest is None:
        return _missing(panel, LAG_MEAN)
    top = 0.0
    if isinstance(bound, int | float):
        panel.axhline(bound, color=INK, linewidth=1.2, linestyle=(0, (4, 4)), zorder=5, label=f"bound {bound:g}")
        top = float(bound)
    if largest is not None:
        panel.plot(steps, largest, color=ORANGE, linewidth=1.4, drawstyle="steps-mid", label="largest")
        top = max(top, float(np.nanmax(largest)))
    if mean is not None:
        panel.plot(steps, mean, color=BLUE, linewidth=2.0, marker=_marker(steps), label="mean")
        top = max(top, float(np.nanmax(mean)))
    # Leave space above the lines for the legend.
    panel.set_ylim(-0.06 * max(top, 1.0), 1.35 * max(top, 1.0))
    _whole(panel.yaxis)
    return _legend(panel, "upper right", columns=3)


def _throughput(panel: Axes, steps: np.ndarray, generated: np.ndarray | None, trained: np.ndarray | None) -> None:
    _head(panel, "Throughput", "tokens per second")
    if generated is None and trained is None:
        return _missing(panel, GENERATED)
    for values, colour, label in ((generated, GREEN, "generated"), (trained, ORANGE, "trained")):
        if values is not None:
            panel.plot(steps, values, color=colour, alpha=0.28, linewidth=1.0)
            panel.plot(steps, smooth(values, _span(steps)), color=colour, linewidth=2.0, marker=_marker(steps), label=label)
    panel.set_ylim(bottom=0, top=panel.get_ylim()[1] * 1.12)
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    return _legend(panel, "lower right", columns=2)


def _length(panel: Axes, steps: np.ndarray, lengths: np.ndarray | None) -> None:
    _head(panel, "Completion length", "mean tokens of the trained completions")
    if lengths is None:
        return _missing(panel, LENGTH)
    panel.plot(steps, lengths, color=GREY, alpha=0.6, linewidth=1.0)
    panel.plot(steps, smooth(lengths, _span(steps)), color=INK, linewidth=2.0, marker=_marker(steps))
    panel.set_ylim(bottom=0, top=panel.get_ylim()[1] * 1.12)
    return None


def _head(panel: Axes, name: str, unit: str) -> None:
    panel.set_title(name, loc="left", fontsize=12, fontweight="bold", color=INK, pad=9)
    panel.set_title(unit, loc="right", fontsize=9.5, color="#6b7480", pad=9)


def _missing(panel: Axes, key: str) -> None:
    panel.text(0.5, 0.5, f"{key} was not recorded", transform=panel.transAxes, ha="center", va="center", color=GREY, fontsize=11)
    panel.set_yticks([])


def _legend(panel: Axes, place: Literal["lower right", "upper right"], columns: int = 1) -> None:
    panel.legend(loc=place, ncols=columns, frameon=False, fontsize=9.5, labelcolor=INK, handlelength=1.6)


def _whole(axis: Axis) -> None:
    """Put ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))


def _calm(panel: Axes) -> None:
    _whole(panel.xaxis)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color("#c9ced4")
    panel.tick_params(colors="#5b636e", length=3, labelsize=9.5, labelbottom=True)
    panel.grid(axis="y", color="#eceff2", linewidth=0.9)
    panel.set_axisbelow(True)
