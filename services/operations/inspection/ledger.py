"""Audits a run: every issued ticket must be in exactly one place, and trained at most once.

Guarantees: all counts are taken at one instant (one Redis Function), so a live run can be audited as well as a finished one; an
audit only reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from services.protocol.errors import StoreError
from services.store import Store

PLACES = {
    "tickets": "waiting or being generated",
    "headers": "generated, not yet settled",
    "buffered": "in the replay table, not yet trained",
    "prepared": "in prepared steps, not yet trained",
    "requeued": "requeued dead letters, to be issued again",
    "reissue": "interrupted by a restore, to be issued again",
}
OUTCOMES = {
    "trained": "trained",
    "stale": "dropped as stale",
    "evicted": "evicted from a full table",
    "failed": "dead letters",
}
FILTERED = "filtered"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class AuditReport:
    """Counts of all tickets. `places` and `outcomes` add up to `issued` when no ticket is lost."""

    run: str
    issued: int
    places: dict[str, int]
    outcomes: dict[str, int]
    lost: int
    """Tickets issued but not found anywhere; negative: more groups exist than were issued."""
    doubled: int
    """Dataset rows that were trained twice in one epoch."""
    slots_used: int
    slots_expected: int
    """Slots that the tickets in flight should hold."""
    refused_submits: int
    """Submissions refused because another pod had taken over the ticket; not an error."""
    messages: tuple[str, ...]
    """Problems found, one line each; empty: none."""

    @property
    def slots_ok(self) -> bool:
        """Whether exactly the tickets in flight hold slots."""
        return self.slots_used == self.slots_expected

    @property
    def ok(self) -> bool:
        """Whether the audit found no problem."""
        return not self.messages

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return {**asdict(self), "messages": list(self.messages), "slots_ok": self.slots_ok, "ok": self.ok}


class _Summary(msgspec.Struct):
    """The parts read from a run's summary."""

    audit: AuditReport


async def audit(store: Store) -> AuditReport:
    """Audit a run. Raise `StoreError` when it does not exist."""
    if await store.run.state() is None:
        raise StoreError(f"there is no run {store.keys.name!r} on this Redis: check run.name and redis.url")
    return assess(store.keys.name, await store.run.audit())


def audit_of_end(folder: Path) -> AuditReport | None:
    """Return the audit in a run's folder, made when the run ended; None: it did not end in order."""
    try:
        summary = msgspec.json.decode((folder / SUMMARY).read_bytes(), type=_Summary)
    except (OSError, msgspec.MsgspecError):
        return None
    return summary.audit


def assess(run: str, counts: Mapping[str, int]) -> AuditReport:
    """Return the report on counts taken at one instant."""
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
    return replace(report, messages=tuple(faults))


def _faults(report: AuditReport, outstanding: int, ledger: Mapping[str, int]) -> list[str]:
    faults: list[str] = []
    if report.lost > 0:
        faults.append(f"{report.lost} of {report.issued} issued tickets are lost")
    if report.lost < 0:
        faults.append(f"{-report.lost} more groups exist than the {report.issued} issued")
    if report.doubled:
        faults.append(f"{report.doubled} prompts were trained twice in one epoch")
    if not report.slots_ok:
        faults.append(f"{report.slots_used} slots are in use for {report.slots_expected} tickets in flight")
    held = report.places["tickets"] + report.places["headers"] + report.places["reissue"]
    if held != outstanding:
        faults.append(f"there are {held} entries for {outstanding} tickets issued and not settled")
    if strange := ledger.get("unknown_tickets", 0) + ledger.get("unknown_headers", 0):
        faults.append(
            f"{strange} messages belong to tickets that were never issued: another program may write to this run's keys"
        )
    return faults
