"""The one-machine launcher: keeps a run's services and its Redis server alive until the run is over.

Guarantees: a service that dies is started again, or the run ends with the reason (supervision.py); nobody is started again
once the run is finished or was asked to stop; when `run` returns, no service of the run is left.
Waits for: services, the run's state, signals. Unblocked by: a tick of `TICK_S`; no wait is longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.console import supervision
from services.console.errors import EXIT_OK, EXIT_REDIS, EXIT_STOPPED
from services.console.mirror import Mirror
from services.console.observe import LOOK_EVERY_S, Look, Observer
from services.console.pods import Unit
from services.console.redis_server import RedisServer
from services.protocol.errors import StoreError

TICK_S = 0.1
OWN_END_S = 15.0  # beyond the drain: how long services may take to end by themselves once the run is finished
TRAINER_STOP_S = 30.0  # a trainer that was asked to stop finishes its step and saves
OTHER_STOP_S = 5.0  # beyond the drain
REDIS_ATTEMPTS = 5
REDIS_LOST_S = 60.0  # so long after a loss of our server, a service that ended for want of Redis is started again


@dataclass(frozen=True)
class Outcome:
    """How the launcher ended: `finished`, `stopped` or `failed`."""

    status: str
    message: str
    code: int


class Display(Protocol):
    """What shows the run to a person."""

    def event(self, text: str) -> None:
        """Something happened."""
        ...

    def steps(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Steps were recorded."""
        ...

    def draw(self, look: Look, waiting: Mapping[str, float]) -> None:
        """A look was taken; `waiting`: seconds until a dead unit starts again."""
        ...


class Launcher:
    """Supervises `units`. `drain_s` is what generators are granted after a SIGTERM."""

    def __init__(
        self, units: Sequence[Unit], observer: Observer, mirror: Mirror, display: Display, *,
        environ: Mapping[str, str], lock_fd: int, drain_s: float, server: RedisServer | None,
    ) -> None:  # fmt: skip
        self.units, self.observer, self.mirror, self.display, self.server = list(units), observer, mirror, display, server
        self._environ, self._lock_fd, self._drain_s = environ, lock_fd, drain_s
        self.restarts = {unit.name: 0 for unit in self.units} | ({"redis": 0} if server else {})
        self._records = {unit.name: supervision.Record() for unit in self.units}
        self._died: dict[str, float] = {}  # unit -> when it was seen dead, until that is decided upon
        self._due: dict[str, float] = {}  # unit -> when it starts again
        self._redis_lost_at, self._redis_failures = float("-inf"), 0
        self._outcome: Outcome | None = None
        self._signals = 0
        self._quit = asyncio.Event()

    def interrupt(self) -> None:
        """Ctrl-C or SIGTERM: stop in order; the second time, at once."""
        self._signals += 1
        if self._signals == 1:
            self._outcome = self._outcome or Outcome("stopped", "stopped", EXIT_STOPPED)
            self.display.event("stopping: services finish what they do (again: end them at once)")

    async def run(self) -> Outcome:
        """Start everything and see it through to the end."""
        looking = asyncio.create_task(self._look())
        try:
            for unit in self.units:
                unit.start(self._environ, self._lock_fd)
            while self._outcome is None:
                await self._tick(looking)
                self._keep_redis()
                for unit in self.units:
                    self._keep(unit)
                if self._outcome is None and self.observer.last.finished:
                    self._outcome = Outcome("finished", self.observer.last.finished, EXIT_OK)
            await self._end(self._outcome, looking)
        finally:
            for unit in self.units:
                unit.kill()
            self._quit.set()
            await asyncio.wait([looking])  # not cancelled: a look is short, and a client may swallow the cancellation
        for look in await self.observer.look_to_the_end():
            self._take_in(look)
        return self._outcome

    async def _tick(self, looking: asyncio.Task[None]) -> None:
        await asyncio.wait([looking], timeout=TICK_S)
        if looking.done():
            looking.result()

    async def _look(self) -> None:
        silent = ""
        while not self._quit.is_set():
            look = await self.observer.look()
            if look is not None:
                self._take_in(look)
            if self.observer.fault and not silent and self.server is None:
                self.display.event(f"Redis does not answer: {self.observer.fault}")
            silent = self.observer.fault
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._quit.wait(), LOOK_EVERY_S)

    def _take_in(self, look: Look) -> None:
        self.display.steps(self.mirror.add(look.records))
        now = time.monotonic()
        self.display.draw(look, {name: max(0.0, due - now) for name, due in self._due.items()})

    def _keep_redis(self) -> None:
        if self.server is None or self.server.alive:
            return
        self._redis_lost_at = time.monotonic()
        try:
            self.server.start()
        except StoreError as error:
            self._redis_failures += 1
            if self._redis_failures >= REDIS_ATTEMPTS:
                self._outcome = Outcome("failed", str(error), EXIT_REDIS)
            return
        self._redis_failures = 0
        self.restarts["redis"] += 1
        self.display.event("Redis died and was started again, with its state")

    def _keep(self, unit: Unit) -> None:
        if self._outcome is not None:
            return
        now = time.monotonic()
        if unit.name in self._due:
            if now >= self._due[unit.name]:
                del self._due[unit.name]
                self.restarts[unit.name] += 1
                unit.start(self._environ, self._lock_fd)
            return
        codes = unit.codes
        if all(code is None for code in codes):
            return
        died = self._died.setdefault(unit.name, now)
        verdict = any(code in supervision.FINAL for code in codes)
        # Whether the run was over when the unit ended is known from a look begun after that.
        if not verdict and self.observer.last.at <= died:
            return
        del self._died[unit.name]
        self._decide(unit, codes, now)

    def _decide(self, unit: Unit, codes: Sequence[int | None], now: float) -> None:
        look = self.observer.last
        decision, self._records[unit.name] = supervision.decide(
            unit.name, self._records[unit.name], codes, lived_s=now - unit.started, committed_step=look.committed_step,
            over=bool(look.finished), redis_lost=now - self._redis_lost_at < REDIS_LOST_S,
        )  # fmt: skip
        if isinstance(decision, supervision.Ended):
            return
        pod = next(pod for pod, code in zip(unit.pods, codes, strict=True) if code is not None)
        said = next((text for each in unit.pods if (text := each.last_error())), "")
        unit.kill()
        if isinstance(decision, supervision.GiveUp):
            message = f"{decision.reason}: {said}" if said else decision.reason
            self._outcome = Outcome("failed", f"{message} (log: {pod.log})", decision.code)
            return
        self._due[unit.name] = now + decision.pause_s
        account = supervision.account(codes)
        self.display.event(
            f"{pod.name} {account}{f': {said}' if said else ''}; {unit.name} starts again in {decision.pause_s:g} s"
        )

    async def _end(self, outcome: Outcome, looking: asyncio.Task[None]) -> None:
        """See every unit to its end: by itself when the run is finished, asked otherwise, killed past its limit."""
        self._due.clear()
        asked = outcome.status != "finished"
        began = time.monotonic()
        if asked:
            self._terminate()
        while self._left():
            await self._tick(looking)
            self._keep_redis()  # a trainer that saves needs it
            waited = time.monotonic() - began
            if self._signals > 1:
                return
            if not asked and (waited > self._drain_s + OWN_END_S or self._signals):
                self.display.event(f"still running after the end: {', '.join(self._left())}; asked to stop")
                self._terminate()
                asked, began = True, time.monotonic()
            elif asked:
                self._kill_late(waited)

    def _left(self) -> list[str]:
        return [unit.name for unit in self.units if unit.alive]

    def _terminate(self) -> None:
        for unit in self.units:
            unit.terminate()

    def _kill_late(self, waited: float) -> None:
        for unit in self.units:
            limit_s = TRAINER_STOP_S if unit.plan.collective else self._drain_s + OTHER_STOP_S
            if waited > limit_s and unit.alive:
                self.display.event(f"{unit.name} did not stop within {limit_s:g} s and is killed")
                unit.kill()
