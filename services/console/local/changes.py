"""Records which settings changed when a run was resumed, each with the step from which it holds.

Guarantees: only keys of `CHANGEABLE` ever change; a run without a line in `changes.jsonl` has the settings that it began with.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from services.config import RunConfig
from services.config.load import CHANGEABLE
from services.config.reading.differences import differing

Changes = dict[str, tuple[Any, Any]]
"""Key -> its value before and now."""


def changes(held: RunConfig, asked: RunConfig) -> Changes:
    """Return which keys of a run that may change differ."""
    return differing(*(config.model_dump(mode="json", include=CHANGEABLE) for config in (held, asked)))


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
