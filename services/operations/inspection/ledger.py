"""The audit of a run: is every ticket that was issued somewhere, in exactly one place, and trained once at most?

Guarantees: all counts are of one instant (one Redis Function), so it may be asked of a run at work as well as of a finished
one; it reads only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from services.protocol.errors import StoreError
from services.store import Store

PLACES = {
    "tickets": "waiting or being generated",
    "headers": "generated, not settled",
    "buffered": "in the replay table, never trained",
    "prepared": "in prepared steps, not yet trained",
    "requeued": "dead letters put back, to be issued again",
    "reissue": "cut off by a restore, to be issued again",
}
OUTCOMES = {
    "trained": "trained",
    "stale": "dropped as too old",
    "evicted": "evicted from a full table",
    "failed": "dead letters",
}
FILTERED = "filtered"


@dataclass(frozen=True)
class AuditReport:
    """What became of every ticket. `places` and `outcomes` add up to `issued` when nothing is lost."""

    run: str
    issued: int
    places: dict[str, int]
    outcomes: dict[str, int]
    lost: int
    """Issued and nowhere to be found; below 0: more groups than were issued."""
    doubled: int
    """Dataset rows that were trained twice in one epoch."""
    slots_used: int
    slots_expected: int
    """Slots that the tickets on their way must hold."""
    refused_submits: int
    """Submissions that came after another pod had taken the ticket over; no fault."""
    messages: tuple[str, ...]
    """What is wrong, one line each; empty when all is well."""

    @property
    def slots_ok(self) -> bool:
        """Whether exactly the tickets on their way hold slots."""
        return self.slots_used == self.slots_expected

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.messages

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, fit for JSON."""
        return {**asdict(self), "messages": list(self.messages), "slots_ok": self.slots_ok, "ok": self.ok}


async def audit(store: Store) -> AuditReport:
    """Audit a run. Raises `StoreError` when there is none of the name."""
    if await store.run.state() is None:
        raise StoreError(f"there is no run {store.keys.name!r} on this Redis: check run.name and redis.url")
    return assess(store.keys.name, await store.run.audit())


def assess(run: str, counts: Mapping[str, int]) -> AuditReport:
    """The report of counts that were taken in one instant."""
    ledger = {name.removeprefix("ledger:"): count for name, count in counts.items() if name.startswith("ledger:")}
    places = {name: counts[name] for name in PLACES}
    outcomes = {name: ledger.get(name, 0) for name in OUTCOMES}
    outcomes |= {name: count for name, count in sorted(ledger.items()) if name.startswith(f"{FILTERED}:")}
    issued = ledger.get("issued", 0)
    report = AuditReport(
        run=run,
        issued=issued,
        places=places,
        outcomes=outcomes,
        lost=issued - sum(places.values()) - sum(outcomes.values()),
        doubled=ledger.get("doubled", 0),
        slots_used=counts["slots_used"],
        slots_expected=counts["outstanding"] + counts["buffered"] + counts["unpublished"],
        refused_submits=ledger.get("refused_submits", 0),
        messages=(),
    )
    faults = _faults(report, counts["outstanding"], ledger)
    return AuditReport(**{**vars(report), "messages": tuple(faults)})


def _faults(report: AuditReport, outstanding: int, ledger: Mapping[str, int]) -> list[str]:
    faults = []
    if report.lost > 0:
        faults.append(f"{report.lost} of {report.issued} issued tickets are lost")
    if report.lost < 0:
        faults.append(f"{-report.lost} more groups exist than the {report.issued} that were issued")
    if report.doubled:
        faults.append(f"{report.doubled} prompts were trained twice in one epoch")
    if not report.slots_ok:
        faults.append(f"{report.slots_used} slots are in use, by {report.slots_expected} tickets on their way")
    held = report.places["tickets"] + report.places["headers"] + report.places["reissue"]
    if held != outstanding:
        faults.append(f"there are {held} entries for {outstanding} tickets that are issued and not settled")
    if strange := ledger.get("unknown_tickets", 0) + ledger.get("unknown_headers", 0):
        faults.append(f"{strange} messages came of tickets that nobody issued: does another program write to this run's keys?")
    return faults
