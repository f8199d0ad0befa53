"""The parts of docs/operating.md that are made: the tables of metrics, and of alerts with their runbooks."""

from __future__ import annotations

import re

from monitoring import declared
from monitoring.alerts import ALERTS

HEADINGS = {
    "run": "Of the run (every dataprep pod shows them, leader or standby)", "dataprep": "Of dataprep",
    "generator": "Of generators",
    "trainer": "Of the trainer, by rank 0", "tracker": "Of trackers", "pod": "Of every pod",
}  # fmt: skip


def metrics() -> str:
    """A table a room."""
    lines: list[str] = []
    for room in declared.ROOMS:
        lines += [f"**{HEADINGS[room]}**", "", "| metric | label | meaning |", "|---|---|---|"]
        for metric in declared.of(room):
            values = ", ".join(f"`{value}`" for value in metric.values) or metric.bound
            label = f"`{metric.label}`: {values}" if metric.label else ""
            lines.append(f"| `{metric.name}` ({metric.kind}) | {label} | {metric.help} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def alerts() -> str:
    """A section an alert."""
    lines: list[str] = []
    for alert in ALERTS:
        summary = re.sub(r"\{\{ \$labels\.(\w+) \}\}", r"<\1>", alert.summary)
        lines += [f"#### {alert.name}", "", f"{summary} ({alert.severity}, lasting {alert.lasting}). {alert.runbook}", ""]
    return "\n".join(lines).rstrip()


def fill(page: str) -> str:
    """The page with what is made between its markers."""
    for name, text in (("metrics", metrics()), ("alerts", alerts())):
        begin, end = f"<!-- {name}: made by python -m monitoring -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"the page lacks the markers {begin!r} and {end!r}")
        page = f"{before}{begin}\n\n{text}\n\n{end}{after}"
    return page
