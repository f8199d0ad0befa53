"""`grpo doctor`: what of a machine, a Redis and a configuration would keep a run from starting or going on, and what to do.

Guarantees: looks, and leaves nothing behind; no look takes longer than its limit; each finding that is a fault has a remedy; one
look that fails does not keep the others from being made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "fault"]


@dataclass(frozen=True)
class Finding:
    """What a look came to. `note`: worth knowing, and no reason to refuse a run."""

    what: str
    state: State
    detail: str
    remedy: str = ""


def ok(what: str, detail: str) -> Finding:
    """All is well."""
    return Finding(what, "ok", detail)


def note(what: str, detail: str, remedy: str = "") -> Finding:
    """Worth knowing."""
    return Finding(what, "note", detail, remedy)


def fault(what: str, detail: str, remedy: str) -> Finding:
    """A run would not start, or not go on."""
    return Finding(what, "fault", detail, remedy)


def told(what: str, error: Exception) -> Finding:
    """A fault whose message says what happened, and after its first colon or semicolon what to do."""
    text = " ".join(str(error).split())
    for mark in ("; ", ": "):
        detail, found, remedy = text.rpartition(mark)
        if found:
            return fault(what, detail, remedy)
    return fault(what, text, "mend what the message names")


def gathered(looks: Iterable[tuple[str, Callable[[], Iterable[Finding]]]]) -> list[Finding]:
    """The findings of all looks; one that breaks is a finding too."""
    found: list[Finding] = []
    for what, look in looks:
        try:
            found += look()
        except Exception as error:  # a machine may be broken in ways that nobody thought of: that is what is asked for
            found.append(fault(what, f"{type(error).__name__}: {error}", "mend what the message names, and look again"))
    return found
