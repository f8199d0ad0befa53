"""A sample log of made-up rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.operations.samples.columns import SCHEMA
from services.operations.samples.folder import LogPosition
from services.tracker.writer import PartWriter


def made_row(number: int, **fields: Any) -> dict[str, Any]:
    """Return row `number`: four completions per group, two groups per step."""
    group, sample = divmod(number, 4)
    row: dict[str, Any] = dict.fromkeys(SCHEMA.names) | {
        "group": f"0-{group}", "sample": sample, "step": group // 2, "outcome": "trained", "reason": "", "source": "main",
        "prompt": f"say {group}", "completion": f"it is {number}", "reward": sample / 4, "advantage": sample / 4 - 0.375,
        "scores": [("exact", sample / 4)], "solved": sample == 3, "truncated": False, "length": 10 + number % 7,
        "prompt_tokens": 3,
        "tool_tokens": 0, "turns": 1, "oldest": group // 2, "newest": group // 2, "generator": "g-0", "seq": group,
        "payload": f"0-{group}.7", "incarnation": 1, "logged_s": 1e9 + number,
        "notes": "", "tokens": [1, 2], "logprobs": [-0.5, -1.0],
    }  # fmt: skip
    return row | fields


def columns_of(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as columns."""
    return {name: [row[name] for row in rows] for name in SCHEMA.names}


def write_log(folder: Path, rows: Sequence[dict[str, Any]], batch: int = 8, keep: int = 10**6) -> PartWriter:
    """Write rows in batches."""
    writer = PartWriter(folder, keep)
    for first in range(0, len(rows), batch):
        piece = rows[first : first + batch]
        writer.write(columns_of(piece), LogPosition(piece[-1]["incarnation"], piece[-1]["step"], {"1": 0}))
        writer.tidy()
    return writer
