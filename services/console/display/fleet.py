"""Shows the pods of a run as a table, for the live screen and for `grpo status`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from services.console.display.text import cell, table
from services.console.printable import printable
from services.operations.condition import Word
from services.operations.figures import NOTHING, number
from services.operations.observe import Member

WAITING = 3  # pods whose wait is explained
QUIET_AGE_S = 3.0  # an older heartbeat is highlighted
COLOURS: dict[Word, str] = {"running": "green", "paused": "yellow", "stopped": "yellow", "finished": "green", "failed": "red"}


def fleet_table(members: Sequence[Member], waiting: Mapping[str, float]) -> Table:
    """Return a table of pods: phase, policy version, throughput and age of the last heartbeat."""
    numbers = ("version", "tok/s", "heartbeat")
    pods = table("pod", "phase", *numbers, right=numbers)
    for member in members:
        status = member.status
        style = "yellow" if member.age_s > QUIET_AGE_S else ""
        version = NOTHING if status.version < 0 else str(status.version)
        rate = number(status.gauges, "tokens_per_s", ",.0f")
        phase = cell(f"{status.phase}, waiting", "yellow") if status.waiting else cell(status.phase)
        pods.add_row(cell(status.name), phase, version, rate, Text(f"{member.age_s:.1f} s ago", style))
    for child, seconds in sorted(waiting.items()):
        pods.add_row(cell(child), Text(f"restarts in {seconds:.0f} s", "yellow"), NOTHING, NOTHING, NOTHING)
    return pods


def waiting_lines(members: Sequence[Member]) -> list[Text]:
    """Return a line for each of the first pods that wait for a service, e.g. for one that makes rewards, or that were asked to
    drain."""
    pods = [member.status for member in members if member.status.waiting or member.status.draining]
    lines = [f"  {pod.name}: {pod.waiting or f'drains, {pod.draining}'}" for pod in pods[:WAITING]]
    if len(pods) > WAITING:
        lines.append(f"  and {len(pods) - WAITING} more generators")
    return [Text(printable(line), "yellow", no_wrap=True, overflow="ellipsis") for line in lines]
