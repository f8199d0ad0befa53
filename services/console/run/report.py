"""Draws `report.png`: reward, staleness, throughput and completion length over the steps of a run.

Guarantees: a missing step or metric leaves a gap or a note in its panel, never an error; the file is written atomically.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from services.console.run.summary import ENDS, ends_of
from services.operations.figures import GENERATED, LAG_MAX, LAG_MEAN, LENGTH, REWARD, TRAINED, duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]

# Colours that colour-blind readers can tell apart, also in grey print (after Okabe and Ito, slightly darkened).
BLUE, ORANGE, GREEN, GREY, INK, PALE = "#1f6fb4", "#d9822b", "#2a8c6d", "#9aa3ad", "#2b2f36", "#6b7480"


def write_report(rows: Rows, summary: Mapping[str, Any], out: Path) -> None:
    """Draw `out` (PNG) from the metrics of the steps in order, and the run's summary."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = np.array([row["step"] for row in rows], dtype=float)
    figure = Figure(figsize=(12, 7.4), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2, sharex=True)
    reward = {REWARD: (BLUE, "")}
    if _smoothed(panels[0][0], "Reward", "mean of the trained completions", rows, steps, reward) and _within_one(rows):
        panels[0][0].set_ylim(0, 1.02)
    _staleness(panels[0][1], rows, steps, summary["max_staleness"])
    rates = {GENERATED: (GREEN, "generated"), TRAINED: (ORANGE, "trained")}
    if _smoothed(panels[1][0], "Throughput", "tokens per second", rows, steps, rates):
        _from_zero(panels[1][0])
        panels[1][0].yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    lengths = {LENGTH: (INK, "")}
    if _smoothed(panels[1][1], "Completion length", "mean tokens of the trained completions", rows, steps, lengths):
        _from_zero(panels[1][1])
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


def title(rows: Rows, summary: Mapping[str, Any]) -> str:
    """Return the run's name, its steps, and the first and last reward, each a mean over several steps."""
    first, last = summary["reward_first"], summary["reward_last"]
    reward = "" if first is None else f" · reward {first:.2f} → {last:.2f}"
    return f"{summary['run']} · {len(rows)} step{'' if len(rows) == 1 else 's'}{reward}"


def subtitle(rows: Rows, summary: Mapping[str, Any]) -> str:
    """Return the model, generators, duration and status."""
    generators = summary["generators"]
    parts = [summary["model"], f"{generators} generator{'' if generators == 1 else 's'}", duration(summary["wall_s"])]
    parts.append(summary["status"])
    if len(rows) > ENDS and summary["reward_first"] is not None:
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


def _smoothed(panel: Axes, name: str, unit: str, rows: Rows, steps: np.ndarray, shown: Mapping[str, tuple[str, str]]) -> bool:
    """Draw metrics, key -> colour and label, each step and smoothed. Return whether any has a value."""
    columns = {key: _column(rows, key) for key in shown}
    if not _headed(panel, name, unit, *columns, columns=list(columns.values())):
        return False
    span = max(1, min(15, len(steps) // 6) | 1)
    average = f"mean of {span} steps" if span > 1 else "each step"
    for key, (colour, label) in shown.items():
        if np.isfinite(columns[key]).any():
            panel.plot(steps, columns[key], color=colour, alpha=0.3, linewidth=1.0)
            _line(panel, steps, smooth(columns[key], span), colour, label or average)
    panel.legend(loc="lower right", ncols=len(shown), frameon=False, fontsize=9.5)
    return True


def _staleness(panel: Axes, rows: Rows, steps: np.ndarray, bound: int) -> None:
    mean, largest = _column(rows, LAG_MEAN), _column(rows, LAG_MAX)
    if not _headed(panel, "Staleness", "lag of the trained rollouts, in steps", LAG_MEAN, columns=[mean, largest]):
        return
    panel.axhline(bound, color=INK, linewidth=1.2, linestyle=(0, (4, 4)), zorder=5, label=f"bound {bound}")
    if np.isfinite(largest).any():
        panel.plot(steps, largest, color=ORANGE, linewidth=1.4, drawstyle="steps-mid", label="largest")
    if np.isfinite(mean).any():
        _line(panel, steps, mean, BLUE, "mean")
    top = np.nanmax([1.0, bound, *mean, *largest])
    panel.set_ylim(-0.06 * top, 1.35 * top)  # with space above the lines for the legend
    _whole(panel.yaxis)
    panel.legend(loc="upper right", ncols=3, frameon=False, fontsize=9.5)


def _headed(panel: Axes, name: str, unit: str, *keys: str, columns: Sequence[np.ndarray]) -> bool:
    """Write a panel's title. Return whether any of its columns has a value; otherwise write that the first key is missing."""
    panel.set_title(name, loc="left", fontsize=12, fontweight="bold", color=INK, pad=9)
    panel.set_title(unit, loc="right", fontsize=9.5, color=PALE, pad=9)
    if any(np.isfinite(column).any() for column in columns):
        return True
    where = {"transform": panel.transAxes, "ha": "center", "va": "center"}
    panel.text(0.5, 0.5, f"{keys[0]} was not recorded", color=GREY, fontsize=11, **where)
    panel.set_yticks([])
    return False


def _within_one(rows: Rows) -> bool:
    rewards = _column(rows, REWARD)
    return bool(np.nanmin(rewards) >= 0 and np.nanmax(rewards) <= 1)


def _from_zero(panel: Axes) -> None:
    """Let the axis begin at 0, with space above the lines."""
    panel.set_ylim(bottom=0, top=panel.get_ylim()[1] * 1.12)


def _line(panel: Axes, steps: np.ndarray, values: np.ndarray, colour: str, label: str) -> None:
    """Draw a line, with dots for few steps, because a line through one point is invisible."""
    panel.plot(steps, values, color=colour, linewidth=2.0, marker="o" if len(steps) < 6 else "", label=label)


def _whole(axis: Any) -> None:
    """Put ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
