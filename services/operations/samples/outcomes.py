"""What became of the sampled tokens of a run, from its sample log."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from services.operations.samples.folder import SAMPLES, SampleFolder

_COLUMNS = ["payload", "step", "outcome", "reason", "length", "tool_tokens", "solved"]


@dataclass(frozen=True)
class SampledTokens:
    """Sampled tokens of the groups in a sample log; a group that several steps trained on counts once."""

    by_outcome: dict[str, float] = field(default_factory=dict[str, float])
    """`trained`, `stale`, `filtered: zero`, … -> tokens."""
    solved: int = 0
    """Trained groups with a solved completion."""


def sampled_tokens(folder: Path) -> SampledTokens:
    """Return what the log in a run's folder says; steps that a restore has undone count, for their tokens were sampled."""
    parts = SampleFolder(folder / SAMPLES).refresh()
    if not parts:
        return SampledTokens()
    arrow: Any = pa
    compute: Any = pc
    table = arrow.concat_tables([part.read(_COLUMNS) for part in parts])
    sampled = compute.subtract(compute.fill_null(table["length"], 0), compute.fill_null(table["tool_tokens"], 0))
    solved = compute.fill_null(table["solved"], False).cast(arrow.int8())
    table = table.append_column("sampled", sampled).append_column("right", solved)
    groups = table.group_by(["payload", "outcome", "reason"]).aggregate(
        [("sampled", "sum"), ("step", "count_distinct"), ("right", "max")]
    )
    found, right = dict[str, float](), set[str]()
    for row in groups.to_pylist():
        name = f"{row['outcome']}: {row['reason']}" if row["outcome"] == "filtered" and row["reason"] else str(row["outcome"])
        found[name] = found.get(name, 0.0) + (row["sampled_sum"] or 0) / max(1, row["step_count_distinct"])
        if row["outcome"] == "trained" and row["right_max"]:
            right.add(row["payload"])
    return SampledTokens(dict(sorted(found.items(), key=lambda one: -one[1])), len(right))
