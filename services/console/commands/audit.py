"""Formats the audit of a run (services/operations/inspection/ledger.py) for a terminal."""

from __future__ import annotations

from services.console.attach import attach, existing
from services.console.display.layout import Grid, Styled
from services.console.errors import ConsoleError
from services.console.reading.from_folder import folder_instead
from services.operations.inspection.ledger import OUTCOMES, PLACES, AuditReport, assess, audit, audit_of_end

__all__ = ["AuditReport", "as_table", "assess", "audit", "counted"]


async def counted(run: str, redis_url: str) -> AuditReport:
    """Audit a run; for a finished run without its Redis, return its final audit. Raises `ConsoleError`."""
    try:
        async with attach(run, redis_url) as attached:
            await existing(attached)
            return await audit(attached.store)
    except ConsoleError as error:
        found = audit_of_end(folder_instead(run, redis_url, error).path)
        if found is None:
            raise error from None
        return found


def as_table(report: AuditReport) -> Grid:
    """Return the report as a table."""
    table = Grid(f"audit of run {report.run}", show_header=False)
    table.column("place", style="bold")
    table.column("groups", justify="right")
    table.column("meaning")
    table.row("issued", f"{report.issued:,}", "")
    table.section()
    for name, count in report.places.items():
        table.row(name, f"{count:,}", PLACES[name])
    table.section()
    for name, count in report.outcomes.items():
        table.row(name, f"{count:,}", OUTCOMES.get(name, f"filtered: {name.partition(':')[2]}"))
    table.section()
    for name, count, fine in (("lost", report.lost, report.lost == 0), ("doubled", report.doubled, report.doubled == 0)):
        table.row(name, Styled(f"{count:,}", "green" if fine else "bold red"), "")
    slots = Styled(f"{report.slots_used:,}", "green" if report.slots_ok else "bold red")
    table.row("slots", slots, f"used by {report.slots_expected:,} tickets in flight")
    for message in report.messages:
        table.row(Styled("fault", "bold red"), "", Styled(message))
    return table
