"""The generated parts of docs/operating.md: the tables of metrics, and of alerts with their runbooks."""

from __future__ import annotations

import re

from monitoring import declared
from monitoring.alerts import ALERTS

HEADINGS = {
    "run": "Run (exposed by every dataprep pod, leader or standby)", "dataprep": "Dataprep",
    "generator": "Generator", "environment": "Environment",
    "trainer": "Trainer (rank 0)", "tracker": "Tracker", "pod": "Every pod",
}  # fmt: skip


def metrics() -> str:
    """Return one table per package."""
    lines: list[str] = []
    for section in declared.SECTIONS:
        lines += [f"**{HEADINGS[section]}**", "", "| metric | label | meaning |", "|---|---|---|"]
        for metric in declared.of(section):
            values = ", ".join(f"`{value}`" for value in metric.values) or metric.bound
            label = f"`{metric.label}`: {values}" if metric.label else ""
            lines.append(f"| `{metric.name}` ({metric.kind}) | {label} | {metric.help} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def alerts() -> str:
    """Return one section per alert."""
    lines: list[str] = []
    for alert in ALERTS:
        summary = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda label: label[1].upper(), alert.summary)
        duration = "" if alert.duration == "0m" else f", after {alert.duration}"
        lines += [f"#### {alert.name}", "", f"{summary} ({alert.severity}{duration}). {alert.runbook}", ""]
    return "\n".join(lines).rstrip()


def fill(page: str) -> str:
    """Return the page with the generated parts between their markers."""
    for name, text in (("metrics", metrics()), ("alerts", alerts())):
        begin, end = f"<!-- {name}: made by python -m monitoring -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"the page lacks the markers {begin!r} and {end!r}")
        page = f"{before}{begin}\n\n{text}\n\n{end}{after}"
    return page
