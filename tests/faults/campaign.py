"""Faults in sequence, each once the run is steady again after the previous one; run after run until all have been applied.

Guarantees: each run ends by itself and is judged as a whole (verdict.py); the first violation ends the campaign; nothing that it
started is left when it returns. Waits for: the moment of a fault, and the steady state after it. Unblocked by: polls of the
watcher. Every wait has a limit.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf

from services.console.errors import EXIT_OK
from services.runtime.loops import end_tasks
from tests.faults.kinds import ENDS, Fault
from tests.faults.run_under_test import TIMED, RunUnderTest, Setting, run_calmly
from tests.faults.strike import Strike
from tests.faults.verdict import Verdict, judge
from tests.faults.watcher import POLL_S, Look, Watcher

MOMENT_LIMIT_S = 5.0  # limit of waiting for a phase: a run may not pass through it again
LAST_STEPS = 8  # no faults in the last steps: the run could end before it is steady again
STEADY_LIMIT_S = {"scripted": 120.0, "vllm": 300.0}
START_LIMIT_S = 600.0  # limit until a run is steady for the first time
END_LIMIT_S = {"scripted": 240.0, "vllm": 900.0}


@dataclass(frozen=True)
class Applied:
    """An applied fault and its cost."""

    fault: Fault
    run: str
    victim: str
    recovery_s: float | None
    """Seconds from the end of the fault to the steady state; None if the next fault or the end of the run came first."""


@dataclass
class Outcome:
    """Results of a campaign."""

    applied: list[Applied] = field(default_factory=list)
    missed: int = 0
    """Faults that found no victim, or no call whose reply could be lost."""
    verdicts: list[Verdict] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    inconclusive: str = ""
    """Why the last run has no result: it never reached the state in which faults are applied."""
    wall_s: float = 0.0


async def campaign(
    setting: Setting, faults: Iterable[Fault], tell: Callable[[str], None], outcome: Outcome, limit_s: float = inf
) -> None:
    """Apply `faults` to runs of `setting`, none after `limit_s`; add results to `outcome` as they arrive."""
    left, started = deque(faults), time.monotonic()
    comparable, calm, number = setting.profile not in TIMED and setting.engine == "scripted", None, 0
    while left and not outcome.violations and not outcome.inconclusive and time.monotonic() - started < limit_s:
        run, before = RunUnderTest(setting, f"faults-{number}"), len(outcome.applied)
        watcher = Watcher(run)
        watcher.tell = tell
        number += 1
        try:
            await _Attack(run, watcher, left, outcome, tell, started + limit_s).carry_out()
        finally:
            await run.close()
            await watcher.close()
            outcome.wall_s = time.monotonic() - started
        outcome.violations += watcher.violations
        if not watcher.violations and not outcome.inconclusive:
            if comparable and calm is None:  # only when needed: most problems show earlier
                calm = await run_calmly(setting, "calm")
            verdict = await judge(run, watcher, calm)
            outcome.verdicts.append(verdict)
            outcome.violations += verdict.violations
            tell(f"{run.name}: {verdict}")
        if len(outcome.applied) == before and not outcome.violations and not outcome.inconclusive and not outcome.missed:
            outcome.inconclusive = f"{run.name} ended before any fault could be applied: give it more --steps"


class _Attack:
    """Applies the faults of one run."""

    def __init__(
        self, run: RunUnderTest, watcher: Watcher, left: deque[Fault], outcome: Outcome, tell: Callable[[str], None],
        deadline: float,
    ) -> None:  # fmt: skip
        """Prepare the attack; no fault is applied after `deadline`, a monotonic time."""
        self.run, self.watcher, self.left, self.outcome, self.tell = run, watcher, left, outcome, tell
        self.deadline, self.limit_s = deadline, STEADY_LIMIT_S[run.setting.engine]
        self._strike = Strike(run, watcher, self.limit_s)

    async def carry_out(self) -> None:
        """Start the run, apply faults while it has steps left, and wait for its end."""
        await self.run.open()
        helpers = [asyncio.create_task(self.watcher.follow()), asyncio.create_task(self.run.keep_standby())]
        try:
            if not await self._ready():
                return
            while self.left and not self._nearly_over() and not self.watcher.violations:
                await self._one(self.left.popleft())
            await self._end()
        finally:
            await end_tasks(helpers)
            for helper in helpers:
                if not helper.cancelled():
                    helper.result()

    async def _ready(self) -> bool:
        """Wait until the run is steady for the first time, and report what it waits for.

        A slow start is the machine's fault, not the run's: a run that does not become steady is inconclusive.
        """
        started, reported = time.monotonic(), ""
        while time.monotonic() < started + START_LIMIT_S and not self.watcher.violations:
            await asyncio.sleep(POLL_S)
            look = self.watcher.last
            why = self._unsteady(look, -1, {})
            if self.run.ended is not None:
                self.watcher.violation(f"grpo run ended with exit code {self.run.ended} as it started: {self.run.last_line}")
                return False
            if not why and look.at:
                return True
            if why != reported:
                reported = why
                self.tell(f"{self.run.name} waits to be steady: {why}")
        if not self.watcher.violations:
            self.outcome.inconclusive = f"{self.run.name} was not steady within {START_LIMIT_S:g} s of its start: {reported}"
        return False

    def _unsteady(self, look: Look, committed: int, replaced: dict[str, str]) -> str:
        """Return why the run is not steady, or an empty string."""
        old = [name for name, boot in replaced.items() if name not in look.pods or look.pods[name].boot == boot]
        if why := look.missing(self.run.pods) or (f"{old[0]} is the process it was" if old else ""):
            return why
        return "" if look.committed > committed else f"no step was committed after {committed}"

    def _nearly_over(self) -> bool:
        return time.monotonic() > self.deadline or self.watcher.last.committed >= self.run.setting.steps - LAST_STEPS

    async def _one(self, fault: Fault) -> None:
        await self._moment(fault)
        if self.watcher.violations:
            return
        before = {name: pod.boot for name, pod in self.watcher.last.pods.items()}
        self.tell(f"{self.run.name} step {self.watcher.last.committed} {fault}")
        victim = self._strike.victim(fault)
        if not await self._strike.carry_out(fault, victim):
            self.outcome.missed += 1
            return
        ended = time.monotonic()
        # The console's exit ends all pods, and rank 0 acts for its commands.
        pod = "trainer-0" if fault.target in ("console", "trainer") else victim
        new = {pod: before.get(pod, "")} if fault.verb in ENDS and fault.target != "redis" else {}
        recovery_s = None
        if not (self.left and self.left[0].hurried):
            steady = await self._steady((await self.watcher.look()).committed, new)
            recovery_s = None if steady is None else steady - ended
        self.outcome.applied.append(Applied(fault, self.run.name, victim, recovery_s))

    async def _moment(self, fault: Fault) -> None:
        """Wait for the fault's phase, then for its delay."""
        who, _, phase = fault.phase.partition(" ")
        deadline = time.monotonic() + MOMENT_LIMIT_S
        while phase and self.watcher.last.phase(who) != phase and time.monotonic() < deadline:
            await asyncio.sleep(0.002)
            await self.watcher.look()
        await asyncio.sleep(fault.delay_s)

    async def _steady(self, committed: int, replaced: dict[str, str]) -> float | None:
        """Return when the run was steady again, or None if it was not.

        Steady means that every pod has sent a heartbeat, those in `replaced` as new processes, and that a step after `committed`
        was committed. Failing that is a violation, unless the run is over.
        """
        since = deadline = time.monotonic()
        deadline += self.limit_s
        while time.monotonic() < deadline and not self.watcher.violations:
            await asyncio.sleep(POLL_S)
            look = self.watcher.last
            if (code := self.run.ended) is not None:
                if code != EXIT_OK:
                    self.watcher.violation(f"grpo run ended with exit code {code}: {self.run.last_line}")
                return None
            why = self._unsteady(look, committed, replaced)
            if look.at > since and (look.finished or not why):
                return look.at
        if not self.watcher.violations:
            self.watcher.violation(f"not steady within {self.limit_s:g} s: {why}")
        return None

    async def _end(self) -> None:
        """Wait for the run and the command to end by themselves. The limit starts again with each step."""
        limit_s, committed = END_LIMIT_S[self.run.setting.engine], -1
        deadline = time.monotonic() + limit_s
        while self.run.ended is None and time.monotonic() < deadline and not self.watcher.violations:
            await asyncio.sleep(POLL_S)
            if self.watcher.last.committed > committed:
                committed, deadline = self.watcher.last.committed, time.monotonic() + limit_s
        if not self.watcher.violations and self.run.ended != EXIT_OK:
            self.watcher.violation(f"grpo run did not end well, exit code {self.run.ended}: {self.run.last_line}")
