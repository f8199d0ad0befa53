"""The command `grpo samples`, which searches a run's sample log in its folder and needs no server."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from services.console.display.text import cell, show, table
from services.console.errors import EXIT_CONFIG, EXIT_OK, ConsoleError
from services.console.options import Json, Reverse, Run
from services.console.paths import existing
from services.console.printable import print_json, printable

SHOWN = 48  # characters of a text in a row of the table
_TABLE = ("step", "group", "sample", "outcome", "reward", "advantage", "length", "versions", "source", "completion")
_NUMBERS = ("step", "sample", "reward", "advantage", "length")
_LONG = ("tokens", "logprobs", "gaps")


def samples(
    run: Run = "",
    where: Annotated[
        str, typer.Option(metavar="EXPRESSION", help="Completions to find, e.g. 'reward < 0.2 and step > 40'.")
    ] = "",
    sort: Annotated[
        str, typer.Option(metavar="COLUMN", help="Sort by this column, lowest first; default: the newest first.")
    ] = "",
    reverse: Reverse = False,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Completions to print.")] = 20,
    offset: Annotated[int, typer.Option(min=0, max=2**31, help="Completions to skip.")] = 0,
    full: Annotated[bool, typer.Option("--full", help="Print whole texts instead of a table.")] = False,
    as_json: Json = False,
) -> int:
    """Search the completions of a run.

    This works during the run and afterwards. An expression compares columns (reward, advantage, step, length, outcome,
    source, solved, truncated, score.NAME and more), joined by and, or and not; 'text' in completion searches texts. An
    unknown column lists all names.
    """
    try:
        from services.operations.samples.columns import SCHEMA
        from services.operations.samples.folder import SAMPLES
        from services.operations.samples.search import ExpressionError, Search
    except ImportError:
        raise ConsoleError("the sample log needs pyarrow and duckdb: pip install 'grpo[dataprep]'", EXIT_CONFIG) from None
    folder = existing(run)
    log = Search.of(folder.path / SAMPLES)
    try:
        found = log.find(where, sort, reverse, offset, limit, [name for name in SCHEMA.names if name not in _LONG])
    except ExpressionError as error:
        raise ConsoleError(str(error), EXIT_CONFIG) from None
    status, damaged = log.folder.status(), log.folder.damaged
    if not found.of and not damaged:
        what = "samples.keep is 0" if not folder.settings.samples.keep else "none has ended yet, or the tracker is not running"
        raise ConsoleError(f"no completions are logged in {log.folder.path}: {what}", EXIT_CONFIG)
    if as_json:
        print_json(
            {
                "total": found.total,
                "of": found.of,
                "missed_groups": status.missed,
                "first_step": status.first_step,
                "damaged_files": damaged,
                "rows": found.rows,
            }
        )
        return EXIT_OK
    if full:
        print("\n\n".join(_whole(row) for row in found.rows))
    elif found.rows:
        rows = table(*_TABLE, right=_NUMBERS)
        for row in found.rows:
            rows.add_row(*map(cell, _short(row)))
        show(rows)
    shown = f"{offset:,} to {offset + len(found.rows) - 1:,} of " if found.rows else ""
    print(f"{shown}{found.total:,} completions match; {found.of:,} are logged")
    if missed := sum(status.missed.values()):
        reasons = ", ".join(f"{count:,} {outcome}" for outcome, count in status.missed.items())
        print(f"{missed:,} groups are missing, because the tracker was behind or gone: {reasons}")
    if status.first_step:
        print(f"the log begins at step {status.first_step}")
    for name, why in damaged.items():
        print(f"{printable(name)} cannot be read: {printable(why)}")
    return EXIT_OK


def _short(row: dict[str, Any]) -> list[str]:
    text = row["completion"] if row["completion"] is not None else row["reason"] or ""
    versions = _number(row["oldest"]) if row["oldest"] == row["newest"] else f"{row['oldest']}–{row['newest']}"
    outcome = f"{row['outcome']}: {row['reason']}" if row["reason"] and row["outcome"] == "filtered" else row["outcome"]
    cut = text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
    return [
        _number(row["step"]),
        row["group"],
        _number(row["sample"]),
        outcome,
        _number(row["reward"]),
        _number(row["advantage"]),
        _number(row["length"]),
        versions,
        row["source"] or "–",
        cut,
    ]


def _whole(row: dict[str, Any]) -> str:
    scores = "".join(f", {name} {_number(score)}" for name, score in row["scores"].items())
    head = f"step {row['step']}, group {row['group']}, completion {_number(row['sample'])}: {row['outcome']}"
    why = f" ({row['reason']})" if row["reason"] else ""
    figures = f"reward {_number(row['reward'])}{scores}, advantage {_number(row['advantage'])}, {_number(row['length'])} tokens"
    if row["gap_mean"] is not None:
        figures += f", logprob gap {_number(row['gap_mean'])} (max {_number(row['gap_max'])})"
    texts = [("prompt", row["prompt"]), ("completion", row["completion"])]
    if row["segments"]:
        texts[1:] = [(f"segment {i}", (s["context"] or "") + (s["text"] or "")) for i, s in enumerate(row["segments"])]
    lines = [f"--- {name}\n{printable(text, keep_lines=True)}" for name, text in texts if text is not None]
    return "\n".join([printable(head + why), printable(figures), *lines])


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
