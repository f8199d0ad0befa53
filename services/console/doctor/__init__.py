"""`grpo doctor`: checks a machine, a Redis and a configuration for what would stop a run, and says what to do.

Guarantees: checks only read and leave nothing behind; no check exceeds its time limit; every fault has a remedy; a check that
fails does not stop the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from services.config import ConfigError
from services.config.places import KeyPlaces

State = Literal["ok", "note", "fault"]


@dataclass(frozen=True)
class Finding:
    """The result of a check. State `note`: worth knowing, but does not prevent a run."""

    what: str
    state: State
    detail: str
    remedy: str = ""
    key: str = ""
    """The key that it is about, if it is about one."""
    place: str = ""
    """Where that is set: a line of the file, an environment variable, or the command line."""

    @property
    def line(self) -> str:
        """The finding on one line: place or subject, what is wrong, and what to do."""
        return ": ".join(part for part in (self.place or self.what, self.detail, self.remedy) if part)


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
    return fault(what, text, "fix this error")


def placed(found: Iterable[Finding], places: KeyPlaces) -> list[Finding]:
    """Return the findings with the keys that faults name, and where these are set."""
    return [replace(one, key=_key(one.detail), place=places.found(one.detail)) if one.state == "fault" else one for one in found]


def of_configuration(error: ConfigError) -> list[Finding]:
    """Return the faults of a configuration, which have their places in front if they are about keys."""
    if error.places is None:  # the file cannot be read
        return [told("", ConfigError(line)) for line in error.faults]
    found = list[Finding]()
    for line in error.faults:
        place, _, message = line.partition(": ")
        detail = told("configuration", ConfigError(message))
        found.append(replace(detail, key=_key(message), place=place) if message else replace(detail, detail=line))
    return found


def _key(text: str) -> str:
    return next(iter(KeyPlaces.named(text)), "")


def gathered(looks: Iterable[tuple[str, Callable[[], Iterable[Finding]]]]) -> list[Finding]:
    """Return the findings of all checks. A check that raises becomes a fault."""
    found: list[Finding] = []
    for what, look in looks:
        try:
            found += look()
        except Exception as error:  # a machine can be broken in unforeseen ways, and finding them is the purpose
            found.append(fault(what, f"{type(error).__name__}: {error}", "fix this error, and run doctor again"))
    return found
