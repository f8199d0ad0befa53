"""Records which settings changed when a run was resumed, each with the step from which it holds.

Guarantees: only keys of `CHANGEABLE` ever change; a run without a line in `changes.jsonl` has the settings that it began with. A
change is recorded before it is applied; `take_back` removes one that a killed start has recorded but not applied.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from services.config import RunConfig
from services.config.differences import differing, flat
from services.config.load import CHANGEABLE
from services.runtime import atomic_folders

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


def take_back(file: Path, held: RunConfig) -> None:
    """Remove the last changes of the history if the run's configuration `held` does not have them, and a torn line after them."""
    kept = _whole_lines(file)
    if kept and _unmade(msgspec.json.decode(kept[-1]), flat(held.model_dump(mode="json", include=CHANGEABLE))):
        del kept[-1]
    if file.exists() and len(whole := b"".join(kept)) < file.stat().st_size:
        atomic_folders.replace(file, whole)


def _whole_lines(file: Path) -> list[bytes]:
    """Return the lines of a history, without a last line that a kill has torn."""
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return lines[:-1] if lines and not lines[-1].endswith(b"\n") else lines


def _unmade(line: dict[str, Any], held: Mapping[str, Any]) -> bool:
    """Return whether all keys have their values from before these changes. Those of a fork are made with its configuration."""
    return "forked_from" not in line and all(held.get(key) == before for key, (before, _) in line["changes"].items())
