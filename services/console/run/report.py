"""Draws `report.png`: reward, staleness, throughput and completion length over the steps of a run.

Guarantees: a step or key missing from `metrics.jsonl` leaves a gap or a note in its panel, never an error; the file is written
atomically.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from services.console.run.summary import ENDS, ends_of
from services.operations.figures import GENERATED, LAG_MAX, LAG_MEAN, LENGTH, REWARD, TRAINED, duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that colour-blind readers can tell apart, also in grey print (after Okabe and Ito, slightly darkened).
BLUE, ORANGE, GREEN, GREY, INK, PALE = "#1f6fb4", "#d9822b", "#2a8c6d", "#9aa3ad", "#2b2f36", "#6b7480"


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
    _reward(panels[0][0], rows, steps)
    _staleness(panels[0][1], rows, steps, summary.get("max_staleness"))
    _throughput(panels[1][0], rows, steps)
    _length(panels[1][1], rows, steps)
    for panel in panels.flat:
        _whole(panel.xaxis)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelbottom=True)
        panel.grid(axis="y", color="#eceff2")
    if len(steps):
        margin = max(0.5, 0.02 * len(steps))  # half a step, so that a single step is centred
        panels[0][0].set_xlim(steps[0] - margin, steps[-1] + margin)
    for panel in panels[1]:
        panel.set_xlabel("training step", color=INK)
    figure.text(0.062, 0.955, title(rows, summary), fontsize=16, fontweight="bold", color=INK)
    figure.text(0.062, 0.922, subtitle(rows, summary), fontsize=10.5, color=PALE)
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
    rewards = rewards[np.isfinite(rewards)]
    if not len(rewards):
        return head
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
    if len(rows) > ENDS and np.isfinite(_column(rows, REWARD)).any():
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


def _column(rows: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """Return the values of a key as floats [n], NaN where a step lacks it."""
    return np.array([float(value) if isinstance(value := row.get(key), int | float) else np.nan for row in rows])


def _reward(panel: Axes, rows: Sequence[Mapping[str, Any]], steps: np.ndarray) -> None:
    rewards, span = _column(rows, REWARD), _span(steps)
    if not _headed(panel, "Reward", "mean of the trained completions", REWARD, rewards):
        return
    if span > 1:
        panel.plot(steps, rewards, color=BLUE, alpha=0.32, linewidth=1.0, label="each step")
    _line(panel, steps, smooth(rewards, span), BLUE, f"mean of {span} steps" if span > 1 else "each step")
    if np.nanmin(rewards) >= 0 and np.nanmax(rewards) <= 1:
        panel.set_ylim(0, 1.02)
    panel.legend(loc="lower right", frameon=False, fontsize=9.5)


def _staleness(panel: Axes, rows: Sequence[Mapping[str, Any]], steps: np.ndarray, bound: Any) -> None:
    mean, largest = _column(rows, LAG_MEAN), _column(rows, LAG_MAX)
    if not _headed(panel, "Staleness", "lag of the trained rollouts, in steps", LAG_MEAN, mean, largest):
        return
    if isinstance(bound, int | float):
        panel.axhline(bound, color=INK, linewidth=1.2, linestyle=(0, (4, 4)), zorder=5, label=f"bound {bound:g}")
    if np.isfinite(largest).any():
        panel.plot(steps, largest, color=ORANGE, linewidth=1.4, drawstyle="steps-mid", label="largest")
    if np.isfinite(mean).any():
        _line(panel, steps, mean, BLUE, "mean")
    top = np.nanmax([1.0, bound if isinstance(bound, int | float) else 0.0, *mean, *largest])
    panel.set_ylim(-0.06 * top, 1.35 * top)  # with space above the lines for the legend
    _whole(panel.yaxis)
    panel.legend(loc="upper right", ncols=3, frameon=False, fontsize=9.5)


def _throughput(panel: Axes, rows: Sequence[Mapping[str, Any]], steps: np.ndarray) -> None:
    generated, trained = _column(rows, GENERATED), _column(rows, TRAINED)
    if not _headed(panel, "Throughput", "tokens per second", GENERATED, generated, trained):
        return
    for values, colour, label in ((generated, GREEN, "generated"), (trained, ORANGE, "trained")):
        if np.isfinite(values).any():
            panel.plot(steps, values, color=colour, alpha=0.28, linewidth=1.0)
            _line(panel, steps, smooth(values, _span(steps)), colour, label)
    panel.set_ylim(bottom=0, top=panel.get_ylim()[1] * 1.12)
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    panel.legend(loc="lower right", ncols=2, frameon=False, fontsize=9.5)


def _length(panel: Axes, rows: Sequence[Mapping[str, Any]], steps: np.ndarray) -> None:
    lengths = _column(rows, LENGTH)
    if _headed(panel, "Completion length", "mean tokens of the trained completions", LENGTH, lengths):
        panel.plot(steps, lengths, color=GREY, alpha=0.6, linewidth=1.0)
        _line(panel, steps, smooth(lengths, _span(steps)), INK, "")
        panel.set_ylim(bottom=0, top=panel.get_ylim()[1] * 1.12)


def _span(steps: np.ndarray) -> int:
    return max(1, min(15, len(steps) // 6) | 1)


def _headed(panel: Axes, name: str, unit: str, key: str, *columns: np.ndarray) -> bool:
    """Write a panel's title. Return whether any of its columns has a value; otherwise write that the key was not recorded."""
    panel.set_title(name, loc="left", fontsize=12, fontweight="bold", color=INK, pad=9)
    panel.set_title(unit, loc="right", fontsize=9.5, color=PALE, pad=9)
    if any(np.isfinite(column).any() for column in columns):
        return True
    panel.text(0.5, 0.5, f"{key} was not recorded", transform=panel.transAxes, ha="center", va="center", color=GREY, fontsize=11)
    panel.set_yticks([])
    return False


def _line(panel: Axes, steps: np.ndarray, values: np.ndarray, colour: str, label: str) -> None:
    """Draw a line, with dots for few steps, because a line through one point is invisible."""
    panel.plot(steps, values, color=colour, linewidth=2.0, marker="o" if len(steps) < 6 else "", label=label)


def _whole(axis: Any) -> None:
    """Put ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
