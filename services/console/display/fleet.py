"""Shows the pods of a run as a table, for the live screen and for `grpo status`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.console.display.layout import Grid, Styled
from services.console.printable import printable
from services.operations.condition import Word
from services.operations.figures import NOTHING, number
from services.operations.observe import Member

WAITING = 3  # pods whose wait is explained
QUIET_AGE_S = 3.0  # an older heartbeat is highlighted
COLOURS: dict[Word, str] = {"running": "green", "paused": "yellow", "stopped": "yellow", "finished": "green", "failed": "red"}


def fleet_table(members: Sequence[Member], waiting: Mapping[str, float]) -> Grid:
    """Return a table of pods: phase, policy version, throughput and age of the last heartbeat."""
    table = Grid(box=None, padding=(0, 2), show_edge=False)
    table.column("pod", header_style="dim")
    table.column("phase", header_style="dim", min_width=14)
    for name in ("version", "tok/s", "heartbeat"):
        table.column(name, header_style="dim", justify="right")
    for member in members:
        status = member.status
        style = "yellow" if member.age_s > QUIET_AGE_S else ""
        version = NOTHING if status.version < 0 else str(status.version)
        rate = number(status.gauges, "tokens_per_s", ",.0f")
        phase = Styled(f"{status.phase}, waiting", style="yellow") if status.waiting else status.phase
        table.row(status.name, phase, version, rate, Styled(f"{member.age_s:.1f} s ago", style=style))
    for child, seconds in sorted(waiting.items()):
        table.row(child, Styled(f"restarts in {seconds:.0f} s", style="yellow"), NOTHING, NOTHING, NOTHING)
    return table


def waiting_lines(members: Sequence[Member]) -> list[Styled]:
    """Return a line for each of the first pods that wait for a service, e.g. for one that makes rewards, or that were asked to
    drain."""
    pods = [member.status for member in members if member.status.waiting or member.status.draining]
    lines = [f"  {pod.name}: {pod.waiting or f'drains, {pod.draining}'}" for pod in pods[:WAITING]]
    if len(pods) > WAITING:
        lines.append(f"  and {len(pods) - WAITING} more generators")
    return [Styled(printable(line), style="yellow", no_wrap=True, overflow="ellipsis") for line in lines]
