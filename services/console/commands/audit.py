"""Formats the audit of a run (services/operations/inspection/ledger.py) for a terminal."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from services.console.attach import attach, existing
from services.console.errors import ConsoleError
from services.console.reading.from_folder import folder_instead
from services.operations.inspection.ledger import OUTCOMES, PLACES, AuditReport, assess, audit, audit_of_end

__all__ = ["AuditReport", "as_table", "assess", "audit", "counted"]


async def counted(run: str, redis_url: str) -> AuditReport:
    """Audit a run; of one that is over and whose Redis is gone, return the audit of its end. Raises `ConsoleError`."""
    try:
        async with attach(run, redis_url) as attached:
            await existing(attached)
            return await audit(attached.store)
    except ConsoleError as error:
        found = audit_of_end(folder_instead(run, redis_url, error).path)
        if found is None:
            raise error from None
        return found


def as_table(report: AuditReport) -> Table:
    """Return the report as a table."""
    table = Table(title=f"audit of run {report.run}", title_justify="left", show_header=False)
    table.add_column("place", style="bold")
    table.add_column("groups", justify="right")
    table.add_column("meaning")
    table.add_row("issued", f"{report.issued:,}", "")
    table.add_section()
    for name, count in report.places.items():
        table.add_row(name, f"{count:,}", PLACES[name])
    table.add_section()
    for name, count in report.outcomes.items():
        table.add_row(name, f"{count:,}", OUTCOMES.get(name, f"filtered: {name.partition(':')[2]}"))
    table.add_section()
    for name, count, fine in (("lost", report.lost, report.lost == 0), ("doubled", report.doubled, report.doubled == 0)):
        table.add_row(name, Text(f"{count:,}", "green" if fine else "bold red"), "")
    slots = Text(f"{report.slots_used:,}", "green" if report.slots_ok else "bold red")
    table.add_row("slots", slots, f"held by {report.slots_expected:,} tickets in flight")
    for message in report.messages:
        table.add_row(Text("fault", "bold red"), "", Text(message))
    return table
