"""What was changed of a run when it was resumed: its history keeps every change with its step.

Guarantees: only keys of `CHANGEABLE` are ever changed; a run without a line in `changes.jsonl` went on as it began.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from services.config import RunConfig
from services.config.load import CHANGEABLE

Changes = dict[str, tuple[Any, Any]]
"""Key -> its value before and now."""


def changes(held: RunConfig, asked: RunConfig) -> Changes:
    """Return which keys of a run that may change differ."""
    old, new = (flat(config.model_dump(mode="json", include=CHANGEABLE)) for config in (held, asked))
    return {key: (old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)}


def in_words(found: Changes) -> str:
    """Return the changes as one line."""
    return ", ".join(f"{key} from {before!r} to {now!r}" for key, (before, now) in found.items())


def record(file: Path, step: int, found: Mapping[str, tuple[Any, Any]], forked_from: str = "") -> None:
    """Append the changes to the run's history: they hold from `step` on. `forked_from`: folder of the run that it came from."""
    line: dict[str, Any] = {"step": step, "time_s": time.time()}
    if forked_from:
        line["forked_from"] = forked_from
    line["changes"] = {key: list(values) for key, values in found.items()}
    with file.open("ab") as lines:
        lines.write(msgspec.json.encode(line) + b"\n")


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return a tree of sections as key -> value; entries of lists of sections are numbered."""
    if isinstance(tree, list) and tree and isinstance(tree[0], Mapping):
        tree = {str(i): item for i, item in enumerate(tree)}
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    return {key: value for name, branch in tree.items() for key, value in flat(branch, f"{prefix}.{name}".strip(".")).items()}
