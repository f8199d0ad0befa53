"""docs/benchmarks.md, made of the recorded results: tables, plots, what is lost and what would close it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.catalogue import SUITE, Axes, Benchmark, Figure

HEAD = """# Benchmarks

Made by `make bench` from `benchmarks/results/`; do not edit. A ratio compares two sides measured in turns in one run: the
median of pairs, with the smallest and largest in brackets; an exponent has two standard errors to either side there. Absolute
figures are those of the machine named and of what else it did. `make bench-check` measures again and compares ratios with these.

"""
FURTHEST = 10.0
"""Times a goal that a plot shows: what is farther on either side, or has no such number, stands there."""


def write_page(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Write the page, and its plots into a folder beside it that has its name."""
    known = [benchmark for benchmark in SUITE if benchmark.name in results]
    plots = path.with_suffix("")
    plots.mkdir(exist_ok=True)
    missed = [
        f"- **{benchmark.title}**, {figure.what}: {_number(value)}, goal {_goal(figure)}. {benchmark.gap}"
        for benchmark in known
        for figure in benchmark.figures
        if (value := results[benchmark.name].get(figure.key)) is not None and not figure.met(value)
    ]
    text = HEAD + f"![Figures over their goals]({plots.name}/goals.svg)\n\n"
    text += "## Goals missed\n\n" + ("\n".join(missed) if missed else "None.") + "\n\n"
    text += "\n".join(_section(benchmark, results[benchmark.name], plots.name) for benchmark in known)
    if absent := [benchmark.name for benchmark in SUITE if benchmark.name not in results]:
        text += f"\nNot recorded yet: {', '.join(absent)}.\n"
    path.write_text(text)
    _plot_goals(known, results, plots / "goals.svg")
    for benchmark in known:
        if benchmark.axes and (curves := results[benchmark.name].get("curves")):
            _plot_curves(curves, benchmark.axes, plots / f"{benchmark.name}.svg")


def _section(benchmark: Benchmark, result: Mapping[str, Any], plots: str) -> str:
    rows = []
    for figure in benchmark.figures:
        if figure.key not in result:
            rows.append(f"| {figure.what} | not reached | {_goal(figure)} |")
            continue
        low, high = result.get("spread", {}).get(figure.key, (result[figure.key],) * 2)
        spread = f" ({_number(low)} to {_number(high)})" if high > low else ""
        rows.append(f"| {figure.what} | {_number(result[figure.key])}{spread} | {_goal(figure)} |")
    machine, repeats = result["machine"], result["repeats"]
    plot = f"\n![{benchmark.title}]({plots}/{benchmark.name}.svg)\n" if benchmark.axes and result.get("curves") else ""
    return (
        f"## {benchmark.title}\n\nAgainst {benchmark.against}. {result['date']}, {machine['cores']} cores of {machine['cpu']}, "
        f"{machine['memory_gib']} GiB, load {machine['load'][0]:g}, {repeats} repetition{'s' * (repeats != 1)}, "
        f"{result['seconds']} s in all.\n\n"
        f"```\npython {' '.join(benchmark.command)}\n```\n\n| figure | measured | goal |\n|---|---|---|\n"
        + "\n".join(rows)
        + f"\n{plot}"
    )


def _goal(figure: Figure) -> str:
    return "–" if figure.goal is None else f"{'≥' if figure.better == 'higher' else '≤'} {figure.goal:g}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _times_goal(figure: Figure, value: float) -> float:
    """A figure as a multiple of its goal, the better the larger."""
    assert figure.goal is not None
    above, below = (value, figure.goal) if figure.better == "higher" else (figure.goal, value)
    if above <= 0 or below <= 0:
        return FURTHEST if figure.met(value) else 1 / FURTHEST
    return min(max(above / below, 1 / FURTHEST), FURTHEST)


def _plot_goals(known: Sequence[Benchmark], results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Every figure that has a goal."""
    bars = [
        (f"{benchmark.name}: {figure.what}", _times_goal(figure, value))
        for benchmark in reversed(known)
        for figure in reversed(benchmark.figures)
        if figure.goal is not None and (value := results[benchmark.name].get(figure.key)) is not None
    ]
    canvas, axes = _canvas(0.7 + 0.3 * max(1, len(bars)))
    heights = [height for _, height in bars]
    axes.barh([name for name, _ in bars], heights, color=["#3b7d4f" if height >= 1 else "#b3472f" for height in heights])
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("times the goal (right of the line: met)")
    axes.tick_params(labelsize=7)
    _save(canvas, path)


def _plot_curves(curves: Mapping[str, Sequence[Sequence[float]]], labels: Axes, path: Path) -> None:
    """All curves of a benchmark."""
    canvas, axes = _canvas(4.5)
    for name, points in curves.items():
        axes.plot([x for x, _ in points], [y for _, y in points], label=name, marker="o" if labels.log else None)
    if labels.log:
        axes.set_xscale("log")
        axes.set_yscale("log")
    axes.set(xlabel=labels.x, ylabel=labels.y)
    axes.legend(frameon=False, fontsize=8)
    _save(canvas, path)


def _canvas(height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(9, height), layout="constrained")
    return canvas, canvas.add_subplot()


def _save(canvas: Any, path: Path) -> None:
    """As an SVG with letters as letters, the same bytes for the same figures."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "benchmarks"}):
        canvas.savefig(path, metadata={"Date": None})
