"""Reports what changed between two polls of a run: its condition, how its trainer resumed, how far services are loaded.

Guarantees: each change is reported once. A service that works is not reported again until it is restarted.
"""

from __future__ import annotations

from collections.abc import Callable

from services.console.display.plain import PlainDisplay
from services.console.printable import printable
from services.operations.condition import Condition, condition, last_resume
from services.operations.figures import duration, prompts_failed
from services.operations.observe import Member, Poll
from services.runtime.exits import one_line

LOADING = {
    "starting": "starting",
    "loading": "loading the model",
    "restoring": "loading the checkpoint",
    "catching up": "retraining the steps after the checkpoint",
    "unsynced": "waiting for weights",
}
"""Phases of a service before it works, in words."""


class Announcer:
    """Compares each poll with the previous one."""

    def __init__(self, display: PlainDisplay, note: Callable[[Condition], None], last_resumed: str = "") -> None:
        """`note` receives each condition of the run. `last_resumed`: what its trainer reported at its previous start."""
        self._display, self._note = display, note
        self._condition: Condition | None = None
        self._resumed = last_resumed
        self._failed = 0  # number of failed prompts when last reported
        self._begun: dict[str, float] = {}  # pod -> monotonic time of its last start, for those this console started
        self._phases: dict[str, str] = {}  # pod -> its phase while it loads
        self._working: set[str] = set()  # pods that work
        self._draining: set[str] = set()  # members whose requested drain was reported

    def started(self, pods: list[str], now: float) -> None:
        """Note that pods are being started now (monotonic seconds)."""
        for pod in pods:
            self._begun[pod] = now
            self._phases.pop(pod, None)
            self._working.discard(pod)

    def worked(self, pods: list[str]) -> bool:
        """Return whether any of these pods got beyond loading since it was started."""
        return not self._working.isdisjoint(pods)

    def announce(self, poll: Poll) -> None:
        """Report changes since the last poll."""
        found = condition(poll.state, live=True)
        if found != self._condition:
            self._note(found)
            if found.detail and poll.state is not None and not (poll.finished or poll.state.failing):  # which ends the run
                self._display.event(printable(found))
            elif self._condition is not None and self._condition.word == "paused" and found.word == "running":
                resumed_by = last_resume(poll.state) if poll.state else ""
                self._display.event(printable(f"running again{f', {resumed_by}' * bool(resumed_by)}"))
            self._condition = found
        resumed = poll.state.resumed if poll.state else ""
        if resumed not in ("", self._resumed):
            self._display.event(f"trainer: {printable(resumed)}")
        self._resumed = resumed
        self._count_failed(poll.failed, poll.last_failure)
        self._load(poll)
        self._drain(poll)

    def _drain(self, poll: Poll) -> None:
        """Report which pods drain because somebody requested it, and why."""
        draining = {member.status.member: member.status for member in poll.members if member.status.draining}
        for status in [status for member, status in draining.items() if member not in self._draining]:
            self._display.event(f"{status.name} drains: {printable(status.draining)}")
        self._draining = set(draining)

    def _count_failed(self, count: int, reason: str) -> None:
        """Report the first prompt that failed, and again whenever their number has doubled."""
        self._failed = min(self._failed, count)  # they can be requeued
        if count >= max(1, 2 * self._failed):
            self._failed = count
            self._display.event(f"{prompts_failed(count)}: {printable(one_line(reason))}")

    def _load(self, poll: Poll) -> None:
        """Report which pods entered a loading phase, or started to work, one line for all in the same phase."""
        entered: dict[str, list[Member]] = {}
        for member in poll.members:
            name, phase = member.status.name, member.status.phase
            if name not in self._begun or name in self._working or self._phases.get(name) == phase:
                continue
            if member.age_s > poll.at - self._begun[name]:  # the last heartbeat of the previous process
                continue
            self._phases[name] = phase
            entered.setdefault(LOADING.get(phase, "ready"), []).append(member)
            if phase not in LOADING:
                self._working.add(name)
        for words, members in entered.items():
            names = sorted(member.status.name for member in members)
            after_s = max(poll.at - self._begun[name] for name in names)
            self._display.loading(f"{', '.join(names)}: {words}, {duration(after_s)} after its start")
