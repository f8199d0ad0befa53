"""The command `grpo compare`, which compares two runs by their folders: configuration, curves, evaluations.

Guarantees: reads files only, so the runs may be running, finished or from another machine; a torn last line is left out.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from services.console.display.text import cell, show, table
from services.console.errors import EXIT_OK
from services.console.options import Json, NamedRun
from services.console.paths import RunPaths, existing
from services.console.printable import print_json
from services.operations.history import recorded

CURVES = (
    "reward/train/mean",
    "reward/gen/mean",
    "reward/train/zero_std_share",
    "length/train/mean",
    "entropy/train/mean",
    "kl/train/mean",
    "gradient/train/norm",
    "logprob_gap/train/mean",
    "staleness/trained/mean",
    "throughput/trained/tokens_per_s",
    "time/elapsed_s",
)
"""Metrics compared without `--metric` (docs/metrics.md)."""
BARS = "▁▂▃▄▅▆▇█"
POINTS = 16  # of a curve in the table
IGNORED = ("run.name", "run.dir", "redis.", "api.", "web.")  # where a run is, not what it does


def compare(
    first: NamedRun,
    second: Annotated[str, typer.Argument(metavar="RUN", help="The other run.")],
    metric: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Compare this metric; may be repeated.")] = None,
    as_json: Json = False,
) -> int:
    """Compare configurations, curves and evaluations of two runs.

    It reads their folders and needs no server.
    """
    folders = existing(first), existing(second)
    names = [folder.path.name for folder in folders]
    if names[0] == names[1]:
        names = [str(folder.path) for folder in folders]
    settings = [_settings(folder) for folder in folders]
    differ = {key: [one.get(key) for one in settings] for key in sorted(settings[0].keys() | settings[1].keys())}
    differ = {key: values for key, values in differ.items() if values[0] != values[1] and not key.startswith(IGNORED)}
    records = [records_of(folder.metrics, "step") for folder in folders]
    rounds = [records_of(folder.evaluations, "eval/version") for folder in folders]
    wanted = [name for name in metric or CURVES if any(name in record for run in records for record in run.values())]
    last_rounds = [run[max(run)] if run else {} for run in rounds]
    scores = sorted({name for one in last_rounds for name in one if name.startswith("eval/") and name != "eval/version"})
    if as_json:
        curves = {
            name: [{str(step): one[name] for step, one in run.items() if name in one} for run in records] for name in wanted
        }
        print_json(
            {
                "runs": names,
                "configuration": differ,
                "steps": [len(run) for run in records],
                "curves": curves,
                "evaluation": {name: [one.get(name) for one in last_rounds] for name in scores},
            }
        )
        return EXIT_OK
    settings_table, curves_table = table("configuration", *names), table("metric", names[0], "last", names[1], "last")
    for key, values in differ.items():
        settings_table.add_row(cell(key), *(cell(_shown(value)) for value in values))
    for name in wanted:
        curves_table.add_row(*map(cell, _curve(name, records)))
    show(settings_table if differ else "the configurations are equal", "", curves_table, "")
    print(f"steps: {len(records[0])} and {len(records[1])}; `last` is the mean of the last tenth of each run")
    for name in scores:
        print(f"last {name}: {' and '.join(_shown(one.get(name)) for one in last_rounds)}")
    return EXIT_OK


def _settings(folder: RunPaths) -> dict[str, Any]:
    """Return the resolved configuration as `section.key` -> value."""
    return dict(_flat(folder.settings.model_dump(mode="json"), ""))


def _flat(tree: Any, prefix: str) -> list[tuple[str, Any]]:
    if isinstance(tree, dict):
        return [pair for name, value in tree.items() for pair in _flat(value, f"{prefix}.{name}" if prefix else name)]  # pyright: ignore
    if isinstance(tree, list) and tree and all(isinstance(one, dict) for one in tree):  # pyright: ignore
        return [pair for i, one in enumerate(tree) for pair in _flat(one, f"{prefix}[{i}]")]  # pyright: ignore
    return [(prefix, tree)]


def records_of(path: Path, key: str) -> dict[int, Mapping[str, float]]:
    """Return the records of a file by number, e.g. `step`; the last one of each number counts."""
    found: dict[int, Mapping[str, float]] = {}
    for record in recorded(path):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found[int(record[key])] = record
    return dict(sorted(found.items()))


def _curve(name: str, runs: Sequence[dict[int, Mapping[str, float]]]) -> list[str]:
    """Return a row: the metric, and of each run its curve and its mean over the last tenth. Both curves have one scale."""
    series = [[_finite(record.get(name)) for record in run.values()] for run in runs]
    known = [value for one in series for value in one if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    row = [name]
    for one in series:
        tail = [value for value in one[-max(1, len(one) // 10) :] if value is not None]
        row += [_bars(one, low, high), _shown(sum(tail) / len(tail) if tail else None)]
    return row


def _bars(values: Sequence[float | None], low: float, high: float) -> str:
    text, count = "", min(POINTS, len(values))
    for i in range(count):
        piece = [value for value in values[i * len(values) // count : (i + 1) * len(values) // count] if value is not None]
        share = (sum(piece) / len(piece) - low) / (high - low) if piece and high > low else 0.0
        text += BARS[min(len(BARS) - 1, int(share * len(BARS)))] if piece else " "
    return text


def _finite(value: float | None) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _shown(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
