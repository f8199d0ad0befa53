"""The one-machine launcher, which keeps a run's services and its Redis server alive until the run ends.

Guarantees: a service that dies is restarted, or the run ends with the reason (supervision.py). Nothing is restarted once the
run has finished or is stopping. When `run` returns, no service of the run is left. The number of generators follows the
desired number (plan.py): new ones start, surplus ones drain, and draining does not count as a death.
Waits for: services, the run's state, signals. Unblocked by: a tick of `TICK_S`; no wait is longer.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.console.display.announcer import Announcer
from services.console.display.plain import PlainDisplay
from services.console.errors import EXIT_FAILED, EXIT_OK, EXIT_REDIS, EXIT_STOPPED
from services.console.printable import printable
from services.console.run import supervision
from services.console.run.mirror import RunRecords
from services.console.run.plan import TRAINER, wanted_generators
from services.console.run.redis_server import RedisServer
from services.operations import figures
from services.operations.condition import Condition
from services.operations.observe import POLL_EVERY_S, Poll, RunFeed
from services.protocol.errors import StoreError
from services.runtime.child_processes import ChildService, ServicePlan
from services.runtime.exits import EXIT_UNLOADED, most_telling
from services.runtime.loops import is_set_within

TICK_S = 0.1
OWN_END_S = 25.0  # time for services to exit on their own once the run has finished
WAIT_TOLD_S = 3.0  # a longer wait for them is reported; most exit sooner
REDIS_ATTEMPTS = 5
EXHAUSTED = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM}
"""Errors of a start that pass: no space, descriptors, processes or memory are left for now."""
AGAIN_S = 10.0  # until another attempt after such an error
FAILING_REMEDY = (
    "fix the cause and rerun the same command, which generates them again (after the first step, changed code of a reward or "
    "an environment needs grpo fork)"
)


@dataclass(frozen=True)
class LaunchOutcome:
    """How the launcher ended."""

    status: Literal["finished", "stopped", "failed"]
    message: str
    code: int


class Launcher:
    """Supervises the children that `plan` returns for a number of generators."""

    def __init__(
        self,
        plan: Callable[[int], Sequence[ServicePlan]],
        count: int,
        limit: int,
        observer: RunFeed,
        records: RunRecords,
        display: PlainDisplay,
        *,
        logs: Path,
        environ: Mapping[str, str],
        lock_fd: int,
        server: RedisServer | None,
        note: Callable[[Condition], None] = lambda _: None,
    ) -> None:
        """`count`: number of generators until another number is requested. `limit`: the number that the machine allows.
        `note` receives each condition of the run.
        """
        self.observer, self.display, self.server = observer, display, server
        self.records = records
        self.plan, self._count, self._limit = plan, count, limit
        self._logs, self._environ, self._lock_fd = logs, environ, lock_fd
        self.children: list[ChildService] = []
        self.restarts = {"redis": 0} if server else {}
        self._generators = -1  # desired number at the last check
        self._records: dict[str, supervision.Record] = {}
        self._died: dict[str, float] = {}  # child -> when it was found dead, until it is decided what to do
        self._due: dict[str, float] = {}  # child -> when it is restarted
        self._redis_failures = 0
        self._redis_due = 0.0  # when it may be restarted
        self._outcome: LaunchOutcome | None = None
        self._signals = 0
        self._announcer = Announcer(display, note)
        self._unwritten = ""  # why records are not in their file, when last reported
        self._restores: set[tuple[int, int]] = set()  # step and incarnation of each restore for which the trainer restarted
        self._quit = asyncio.Event()

    def interrupt(self) -> None:
        """Handle Ctrl-C or SIGTERM: stop cleanly; on the second one, immediately."""
        self._signals += 1
        if self._signals == 1:
            self._outcome = self._outcome or LaunchOutcome("stopped", "stopped", EXIT_STOPPED)
            self.display.event("stopping: services finish their current work (press Ctrl-C again to kill them)")

    async def run(self) -> LaunchOutcome:
        """Start everything and supervise it to the end."""
        polling = asyncio.create_task(self._poll())
        try:
            while self._outcome is None:
                self._rescale()
                await self._tick(polling)
                self._keep_redis()
                for child in list(self.children):
                    self._keep(child)
                self._outcome = self._outcome or self._over()
            await self._end(self._outcome, polling)
        finally:
            for child in self.children:
                child.kill()
            self._quit.set()
            await asyncio.wait([polling])  # not cancelled: it is short, and a client may swallow the cancellation
        async for poll in self.observer.poll_to_end():
            self._take_in(poll)
        return self._outcome

    def _over(self) -> LaunchOutcome | None:
        """Return how the run ends if it has finished, or has paused itself because one prompt after another fails."""
        if finished := self.observer.last.finished:
            return LaunchOutcome("finished", finished, EXIT_OK)
        state = self.observer.last.state
        if state is not None and state.failing:
            return LaunchOutcome("failed", f"prompts keep failing: {printable(state.failing)}; {FAILING_REMEDY}", EXIT_FAILED)
        return None

    async def _tick(self, polling: asyncio.Task[None]) -> None:
        await asyncio.wait([polling], timeout=TICK_S)
        if polling.done():
            polling.result()

    async def _poll(self) -> None:
        silent = ""
        while not self._quit.is_set():
            poll = await self.observer.poll()
            if poll is not None:
                self._take_in(poll)
            if self.observer.fault and not silent and self.server is None:
                self.display.event(f"Redis does not respond: {self.observer.fault}")
            silent = self.observer.fault
            await is_set_within(self._quit, POLL_EVERY_S)

    def _take_in(self, poll: Poll) -> None:
        self._announcer.announce(poll)
        steps, rounds = self.records.add(poll)
        self.display.steps(steps)
        for record in rounds:
            self.display.event(figures.evaluation_line(record))
        if bool(why := self.records.fault) != bool(self._unwritten):
            lasting = f"{printable(why)}; the run continues, and its records are written once that is possible"
            self.display.event(lasting if why else "the run's records are written again")
        self._unwritten = why
        now = time.monotonic()
        self.display.draw(poll, {name: max(0.0, due - now) for name, due in self._due.items()})

    def _keep_redis(self) -> None:
        if self.server is None or self.server.alive or time.monotonic() < self._redis_due:
            return
        try:
            self.server.start()
        except StoreError as error:
            self._redis_failures += 1
            if self._redis_failures >= REDIS_ATTEMPTS:
                self._outcome = LaunchOutcome("failed", str(error), EXIT_REDIS)
            return
        except OSError as error:
            self._redis_due = self._due_again("Redis cannot be restarted", error)
            return
        self._redis_failures = 0
        self.restarts["redis"] += 1
        self.display.event("Redis died and was restarted with its data")

    def _rescale(self) -> None:
        """Start missing children and drain surplus ones. A child that is draining is started again only after it exits."""
        generators, refusal = wanted_generators(self.observer.last.state, self._count, self._limit)
        plans = {plan.name: plan for plan in self.plan(generators)}
        if generators != self._generators:
            if refusal:
                self.display.event(refusal)
            elif self._generators >= 0:
                self.display.event(f"desired generators changed from {self._generators} to {generators}")
            self._generators = generators
        for child in [child for child in self.children if child.name not in plans and not child.retired]:
            self._due.pop(child.name, None)
            child.retire()
        there = {child.name for child in self.children}
        for name in [name for name in plans if name not in there]:
            child = ChildService(plans[name], self._logs)
            self.children.append(child)
            self.restarts.setdefault(name, 0)
            self._records[name] = supervision.Record()
            self._start(child)

    def _start(self, child: ChildService) -> None:
        self._announcer.started([pod.name for pod in child.pods], time.monotonic())
        try:
            child.start(self._environ, self._lock_fd)
        except OSError as error:
            self._due[child.name] = self._due_again(f"{child.name} cannot be started", error)
            child.kill()  # the pods that have started

    def _due_again(self, what: str, error: OSError) -> float:
        """Report a start that failed for lack of something, and return when to try again. Raises any other error."""
        if error.errno not in EXHAUSTED:
            raise error
        self.display.event(f"{what}: {printable(error)}; trying again in {AGAIN_S:g} s")
        return time.monotonic() + AGAIN_S

    def _see_off(self, child: ChildService) -> None:
        """Forget a retired child once it has exited, and kill it when it is overdue."""
        self._kill_if_overdue(child)
        if child.alive:
            return
        child.kill()  # also its child processes
        self.children.remove(child)
        self._died.pop(child.name, None)
        codes = [code for code in child.codes if code is not None]  # none if it could never be started
        drained = all(code in (EXIT_OK, EXIT_UNLOADED) for code in codes)
        how = "drained and exited" if drained else f"{supervision.account(codes)} while draining"
        self.display.event(f"{child.name} {how}" if codes else f"{child.name} is no longer needed and was not started")

    def _keep(self, child: ChildService) -> None:
        if self._outcome is not None:
            return
        if child.retired:
            self._see_off(child)
            return
        now = time.monotonic()
        if child.name in self._due:
            if now >= self._due[child.name]:
                del self._due[child.name]
                self.restarts[child.name] += 1
                self._start(child)
            return
        codes = child.codes
        if all(code is None for code in codes):
            return
        died = self._died.setdefault(child.name, now)
        # Only an observation that began after the child's end can say whether the run had already finished, and Redis serves it.
        if not supervision.verdicts(codes, self._redis_served) and self.observer.last.at <= died:
            return
        del self._died[child.name]
        self._decide(child, codes, now)

    @property
    def _redis_served(self) -> bool:
        """Whether Redis is the run's own, or the run has been read from it."""
        return self.server is not None or self.observer.last.state is not None

    def _decide(self, child: ChildService, codes: Sequence[int | None], now: float) -> None:
        poll = self.observer.last
        pod = next(pod for pod, code in zip(child.pods, codes, strict=True) if code is not None)
        if self._restores_next(child, codes, poll):
            child.kill()
            self._start(child)
            return
        drained = child.name.startswith("generator-") and EXIT_OK in codes
        said = printable(most_telling([each.cause() for each in child.pods]))
        decision, self._records[child.name] = supervision.decide(
            child.name,
            self._records[child.name],
            codes,
            lived_s=now - child.started,
            committed_step=poll.committed_step,
            over=bool(poll.finished),
            redis_served=self._redis_served,
            cause=said,
            worked=self._announcer.worked([each.name for each in child.pods]),
            drained=drained,
        )
        if isinstance(decision, supervision.Ended):
            return
        if isinstance(decision, supervision.GiveUp) and not child.plan.essential:
            decision = supervision.Start(supervision.LATER_S)
        child.kill()
        if isinstance(decision, supervision.GiveUp):
            message = f"{decision.reason}: {said}" if said else decision.reason
            self._outcome = LaunchOutcome("failed", f"{message} (log: {pod.log})", decision.code)
            return
        self._due[child.name] = now + decision.pause_s
        account = supervision.account(codes, drained)
        self.display.event(
            f"{pod.name} {account}{f': {said}' if said else ''}; restarting {child.name} in {decision.pause_s:g} s"
        )

    def _restores_next(self, child: ChildService, codes: Sequence[int | None], poll: Poll) -> bool:
        """Return whether a trainer ended to restore a checkpoint, as requested: the first time, that is not a failure."""
        state = poll.state
        if child.name != TRAINER or state is None or state.restore < 0 or EXIT_FAILED not in codes:
            return False
        request = (state.restore, state.incarnation)
        if request in self._restores:
            return False
        self._restores.add(request)
        self.display.event(f"the trainer restarts to restore the checkpoint of step {state.restore}")
        return True

    async def _end(self, outcome: LaunchOutcome, polling: asyncio.Task[None]) -> None:
        """Wait for every child to exit: on its own if the run has finished, otherwise on request; kill it past its limit."""
        self._due.clear()
        asked, told, began = outcome.status != "finished", False, time.monotonic()
        for child in self.children:
            if asked or child.plan.stays:  # which does not exit when the run finishes
                child.terminate()
        while self._left():
            await self._tick(polling)
            self._keep_redis()  # the trainer needs it to save
            waited = time.monotonic() - began
            if self._signals > 1:
                return
            if not (asked or told) and waited > WAIT_TOLD_S and (left := ", ".join(self._left())):
                self.display.event(
                    f"the run has finished; waiting up to {OWN_END_S:g} s for {left} to exit (Ctrl-C to stop waiting)"
                )
                told = True
            if not asked and (waited > OWN_END_S or self._signals):
                self.display.event(f"still running after the end of the run: {', '.join(self._left())}; terminating them")
                for child in self.children:
                    child.terminate()
                asked, began = True, time.monotonic()
            for child in self.children:
                self._kill_if_overdue(child)

    def _left(self) -> list[str]:
        return [child.name for child in self.children if child.alive]

    def _kill_if_overdue(self, child: ChildService) -> None:
        if child.overdue:
            self.display.event(f"{child.name} did not stop within {child.plan.stop_s:g} s: killing it")
            child.kill()
