"""Formats the audit of a run (services/operations/inspection/ledger.py) for a terminal."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from services.operations.inspection.ledger import OUTCOMES, PLACES, AuditReport, assess, audit

__all__ = ["AuditReport", "as_table", "assess", "audit"]


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
