"""Shows a run as a live screen: progress, the last step's figures, the fleet (also for `grpo status`) and the last events.

Guarantees: it redraws at most twice a second; an unknown value is a dash.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from services.console.display.plain import PlainDisplay
from services.console.display.text import cell, table
from services.console.printable import printable
from services.operations import figures
from services.operations.condition import Word, awaited, condition
from services.operations.figures import NOTHING, duration, number
from services.operations.observe import Member, Poll

EVENTS = 6  # lines kept on the screen
WAITING = 3  # pods whose wait is explained
QUIET_AGE_S = 3.0  # an older heartbeat is highlighted
COLOURS: dict[Word, str] = {"running": "green", "paused": "yellow", "stopped": "yellow", "finished": "green", "failed": "red"}


class ScreenDisplay(PlainDisplay):
    """Draws on a terminal. Use it as a context manager."""

    def __init__(
        self, run: str, steps: int, rows: Sequence[Mapping[str, float]], logs: Path, console: Console | None = None
    ) -> None:
        """`rows`: the steps recorded so far."""
        super().__init__(steps, logs)
        self._run = run
        self._rows.extend(rows)
        self._events: deque[str] = deque(maxlen=EVENTS)
        self._poll, self._waiting = Poll(), dict[str, float]()
        self._live = Live(console=console, auto_refresh=False, get_renderable=self.render)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.refresh()
        self._live.stop()

    def event(self, text: str) -> None:
        """Show an event."""
        self._events.append(text)
        self._live.refresh()

    def loading(self, text: str) -> None:
        """Do nothing: the table of pods has the phases."""

    def steps(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Add steps, which the next `draw` shows."""
        self._rows.extend(rows)

    def draw(self, poll: Poll, waiting: Mapping[str, float]) -> None:
        """Redraw. Called twice a second."""
        self._poll, self._waiting = poll, dict(waiting)
        self._events.extend(self._tail.poll())
        self._live.refresh()

    def render(self) -> RenderableType:
        """Return the whole screen."""
        parts = [
            self._progress(),
            *self._condition(),
            Text(),
            self._figures(),
            Text(),
            fleet_table(self._poll.members, self._waiting),
        ]
        parts += waiting_lines(self._poll.members)
        if self._events:
            parts += [Text(), *(Padding(Text(line, style="yellow"), (0, 0, 0, 2)) for line in self._events)]
        return Group(*parts)

    def _progress(self) -> RenderableType:
        done = self._poll.committed_step + 1
        left = figures.left_s(self._rows, self._steps)
        grid = Table.grid(padding=(0, 2))
        found = condition(self._poll.state, live=True)
        grid.add_row(
            Text(f"  {self._run}", style="bold"),
            ProgressBar(self._steps, done, width=40),
            f"{done}/{self._steps} steps",
            f"{duration(left)} left" if left else "",
            Text(found.word, style=COLOURS[found.word]),
        )
        return grid

    def _condition(self) -> list[RenderableType]:
        """Return a line on the run's condition, and one with what it waits for."""
        state, pods = self._poll.state, [member.status for member in self._poll.members]
        what = awaited(state, pods, state.scale.wanted if state else None)
        found = condition(state, live=True)
        lines = [str(found) if found.detail else "", f"waiting for {what}" if what else ""]
        return [Text(f"  {printable(line)}", style="yellow") for line in lines if line]

    def _figures(self) -> RenderableType:
        last = self._rows[-1] if self._rows else {}
        state = self._poll.state
        slots = f"{state.slots_used}/{state.slots}" if state else NOTHING
        shown = [
            ("reward", number(last, figures.REWARD, ".3f")),
            ("lag mean/max", f"{number(last, figures.LAG_MEAN)} / {number(last, figures.LAG_MAX, '.0f')}"),
            ("generated tok/s", number(last, figures.GENERATED, ",.0f")),
            ("trained tok/s", number(last, figures.TRAINED, ",.0f")),
            ("length", number(last, figures.LENGTH, ".1f")),
            ("step", duration(last.get(figures.STEP_S))),
            ("slots", slots),
        ]
        drawn = Table(box=None, padding=(0, 2), show_edge=False)
        for name, _ in shown:
            drawn.add_column(name, header_style="dim", justify="right")
        drawn.add_row(*(value for _, value in shown))
        return drawn


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
