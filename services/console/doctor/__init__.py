"""`grpo doctor`: checks a machine, a Redis and a configuration for what would stop a run, and says what to do.

Guarantees: checks only read and leave nothing behind; no check exceeds its time limit; every fault has a remedy; a check that
fails does not stop the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "fault"]


@dataclass(frozen=True)
class Finding:
    """The result of a check. State `note`: worth knowing, but does not prevent a run."""

    what: str
    state: State
    detail: str
    remedy: str = ""


def ok(what: str, detail: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(what, "ok", detail)


def note(what: str, detail: str, remedy: str = "") -> Finding:
    """Return a finding that is worth knowing but does not prevent a run."""
    return Finding(what, "note", detail, remedy)


def fault(what: str, detail: str, remedy: str) -> Finding:
    """Return a finding that would prevent a run or stop it."""
    return Finding(what, "fault", detail, remedy)


def told(what: str, error: Exception) -> Finding:
    """Return a fault for an error whose message says, after its last semicolon (or else its last colon), what to do."""
    text = " ".join(str(error).split())
    for mark in ("; ", ": "):
        detail, found, remedy = text.rpartition(mark)
        if found:
            return fault(what, detail, remedy)
    return fault(what, text, "fix what the message names")


def gathered(looks: Iterable[tuple[str, Callable[[], Iterable[Finding]]]]) -> list[Finding]:
    """Return the findings of all checks. A check that raises becomes a fault."""
    found: list[Finding] = []
    for what, look in looks:
        try:
            found += look()
        except Exception as error:  # a machine can be broken in unforeseen ways, and finding them is the purpose
            found.append(fault(what, f"{type(error).__name__}: {error}", "fix what the message names, and run doctor again"))
    return found
