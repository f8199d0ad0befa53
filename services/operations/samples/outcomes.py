"""What became of the sampled tokens of a run, from its sample log.

Guarantees: with `samples.share` below 1, counts are estimates for all groups; if the log lacks other groups, `missing` says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from services.operations.samples.folder import SAMPLES, Part, SampleFolder

CHANGES = "changes.jsonl"
"""Changes of a run's configuration; of a fork, its first line has `forked_from` and its first step."""
_COLUMNS = ["payload", "step", "outcome", "reason", "length", "tool_tokens", "solved"]


@dataclass(frozen=True)
class SampledTokens:
    """Sampled tokens of the groups in a sample log; a group that several steps trained on counts once."""

    by_outcome: dict[str, float] = field(default_factory=dict[str, float])
    """`trained`, `stale`, `filtered: zero`, … -> tokens."""
    solved: int = 0
    """Trained groups with a solved completion."""
    missing: str = ""
    """Why the log lacks groups of the run, besides those that are not in its share; empty: it has them all."""


def sampled_tokens(folder: Path) -> SampledTokens:
    """Return what the log in a run's folder says; steps that a restore has undone count, for their tokens were sampled."""
    log = SampleFolder(folder / SAMPLES)
    if not log.refresh():
        return SampledTokens(missing=", ".join(_missing(log, folder)))
    arrow: Any = pa
    groups = arrow.concat_tables([_counted(part) for part in log.parts]).group_by(["payload", "outcome", "reason"])
    groups = groups.aggregate([("sampled", "sum"), ("step", "count_distinct"), ("right", "max"), ("stands_for", "mean")])
    found, right = dict[str, float](), dict[str, float]()
    for row in groups.to_pylist():
        name = f"{row['outcome']}: {row['reason']}" if row["outcome"] == "filtered" and row["reason"] else str(row["outcome"])
        found[name] = found.get(name, 0.0) + (row["sampled_sum"] or 0) / max(1, row["step_count_distinct"])
        if row["outcome"] == "trained" and row["right_max"]:
            right[row["payload"]] = row["stands_for_mean"]
    ordered = dict(sorted(found.items(), key=lambda one: -one[1]))
    return SampledTokens(ordered, round(sum(right.values())), ", ".join(_missing(log, folder)))


def _counted(part: Part) -> Any:
    """Return the rows of a file, each with the sampled tokens and the number of groups that it stands for."""
    arrow: Any = pa
    compute: Any = pc
    table, stands_for = part.read(_COLUMNS), arrow.scalar(1 / part.position.share)
    sampled = compute.subtract(compute.fill_null(table["length"], 0), compute.fill_null(table["tool_tokens"], 0))
    table = table.append_column("sampled", compute.multiply(sampled, stands_for))
    table = table.append_column("right", compute.fill_null(table["solved"], False).cast(arrow.int8()))
    return table.append_column("stands_for", arrow.repeat(stands_for, table.num_rows))


def _missing(log: SampleFolder, folder: Path) -> Iterator[str]:
    """Yield why groups are missing from the log."""
    status, parts = log.status(), log.parts
    if missed := sum(status.missed.values()):
        yield f"{missed:,} groups were missed because the tracker was behind or not running"
    if status.first_step > _began_at(folder):
        yield f"the log begins at step {status.first_step}"
    if parts and parts[0].first > 1:
        yield "the oldest completions were deleted (samples.keep)"
    if log.damaged or any(log.path.glob("damaged-*")) or any(after.first > before.last + 1 for before, after in pairwise(parts)):
        yield "a file of the log is missing or damaged"


def _began_at(folder: Path) -> int:
    """Return the first step of the run: that after the checkpoint for a fork, else 0."""
    try:
        first: Any = msgspec.json.decode((folder / CHANGES).read_bytes().partition(b"\n")[0])
        return int(first["step"]) if "forked_from" in first else 0
    except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError):
        return 0
