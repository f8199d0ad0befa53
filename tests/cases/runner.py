"""Reads the files of a folder of cases and tries each line on the product."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cases import door, judge, math, procedures, rows, settings, tool_calls

Case = dict[str, Any]

WAYS = {
    "math": math.attempt,
    "judge": judge.attempt,
    "tool_calls": tool_calls.attempt,
    "door": door.attempt,
    "rows": rows.attempt,
    "settings": settings.attempt,
}
"""Name of a file -> how its cases are tried: (case, its folder, an empty folder) -> (what was found, whether it is right)."""
DATA, MORE = (Path(__file__).parent / name for name in ("data", "more"))
"""Cases from elsewhere, and the project's own."""


@dataclass(frozen=True)
class Outcome:
    """A case that was tried."""

    case: Case
    found: Any
    right: bool


def read(folder: Path) -> Iterator[tuple[str, Case]]:
    """Yield the cases of a folder with the name of their file."""
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").split("\n"):
            if line.strip():
                yield file.stem, json.loads(line)


def outcomes(folder: Path, only: str = "") -> Iterator[Outcome]:
    """Try the cases of a folder whose kind or id contains `only`."""
    for name, case in read(folder):
        if only in case["kind"] or only in case["id"]:
            yield Outcome(case, *tried(name, case, folder))


def tried(name: str, case: Case, folder: Path) -> tuple[Any, bool]:
    """Return what the product makes of a case, and whether it is right."""
    name_of_test = case["id"] if case["id"] in procedures.NODES else procedures.KINDS.get(case["kind"])
    if name == "settings" and name_of_test is not None:
        return procedures.attempt(procedures.NODES[name_of_test])
    with tempfile.TemporaryDirectory() as scratch:
        try:
            return WAYS[name](case, folder, Path(scratch))
        except Exception as error:  # whatever the product raises is what was found
            return f"{type(error).__name__}: {error}", False


def summary(found: list[Outcome]) -> dict[str, Any]:
    """Return the number of cases and of right ones, also by kind."""
    kinds: dict[str, dict[str, int]] = {}
    for outcome in found:
        counts = kinds.setdefault(outcome.case["kind"], {"cases": 0, "right": 0})
        counts["cases"] += 1
        counts["right"] += outcome.right
    return {"cases": len(found), "right": sum(outcome.right for outcome in found), "by_kind": kinds}
