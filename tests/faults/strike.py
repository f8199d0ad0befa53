"""Doing it: each verb of kinds.py on a real process, connection or server."""

from __future__ import annotations

import asyncio
import signal
import time

from redis.exceptions import RedisError

from services.console.errors import EXIT_OK, EXIT_STOPPED
from services.protocol.errors import StoreError
from tests.faults.kinds import AT_THE_END, AT_THE_START, Fault
from tests.faults.run_under_test import RunUnderTest
from tests.faults.watcher import POLL_S, Watcher

LOST_LIMIT_S, LOST_STEPS = 5.0, 2  # how long a call is waited for whose reply is to be lost, and for how many steps at least
STARTED_LIMIT_S, ENDED_LIMIT_S = 30.0, 8.0  # the same for a call that a pod makes when it starts, or when it ends


class Strike:
    """Applies faults to `run`; what must not follow from them goes to `watcher` as a violation, within `limit_s`."""

    def __init__(self, run: RunUnderTest, watcher: Watcher, limit_s: float) -> None:
        self.run, self.watcher, self.limit_s = run, watcher, limit_s

    def victim(self, fault: Fault) -> str:
        """Whom it hits: who leads, or stands by, is known at the moment alone."""
        roles = {"leader": "leading", "standby": "standby"}
        return (self.watcher.last.dataprep(roles[fault.victim]) if fault.victim in roles else fault.victim) or "dataprep-0"

    async def carry_out(self, fault: Fault, victim: str) -> bool:
        """Do it; returns once it is over. False: there was nobody to do it to."""
        match fault.verb:
            case "kill" | "term":
                return await self._kill(victim, signal.SIGKILL if fault.verb == "kill" else signal.SIGTERM)
            case "stop":
                pids = self.run.signal(victim, signal.SIGSTOP)
                await asyncio.sleep(fault.duration_s)
                self.run.wake(pids)
                return bool(pids)
            case "cut":
                self.run.proxies[victim].cut()
                await asyncio.sleep(fault.duration_s)
                self.run.proxies[victim].mend()
            case "lose":
                return await self._lose(victim, fault.call)
            case "drop" | "pause":
                return await self._command(fault, victim)
            case "twin":
                await self._twin()
        return True

    async def _kill(self, victim: str, sig: signal.Signals) -> bool:
        """A trainer of many ranks heeds a SIGTERM on rank 0 alone, which speaks for all."""
        if victim == "redis" and self.run.setting.appendfsync != "always":
            self.watcher.may_go_back = True
        pids = self.run.signal("trainer-0" if sig == signal.SIGTERM and victim.startswith("trainer") else victim, sig)
        if victim == "console" and pids:
            deadline = time.monotonic() + self.limit_s
            while (code := self.run.ended) is None and time.monotonic() < deadline:
                await asyncio.sleep(POLL_S)
            if sig == signal.SIGTERM and code not in (EXIT_STOPPED, EXIT_OK):
                self.watcher.violation(f"grpo run, told to stop, ended with {code}: {self.run.last_line}")
            self.run.start()
        return bool(pids)

    async def _lose(self, victim: str, call: str) -> bool:
        proxy = self.run.proxies[victim]
        proxy.lose_reply(call)
        limit_s = LOST_LIMIT_S
        if call in AT_THE_START + AT_THE_END:
            starts = call in AT_THE_START
            self.run.signal(victim, signal.SIGKILL if starts else signal.SIGTERM)
            limit_s = STARTED_LIMIT_S if starts else ENDED_LIMIT_S
        await self._lost(proxy.lost, limit_s, 0 if call in AT_THE_START + AT_THE_END else LOST_STEPS)
        proxy.spare()
        return proxy.lost.is_set()

    async def _lost(self, lost: asyncio.Event, limit_s: float, steps: int) -> None:
        """Wait for as long as it takes a busy machine: at least until so many more steps are committed."""
        began, since = self.watcher.last.committed, time.monotonic()
        while not lost.is_set() and self.run.ended is None and not self.watcher.violations:
            slow = self.watcher.last.committed < began + steps
            if time.monotonic() - since > (self.limit_s if slow else limit_s):
                return
            await asyncio.sleep(POLL_S)

    async def _command(self, fault: Fault, victim: str) -> bool:
        """What the server itself is told; past the retries of a store, which would wait a pause out."""
        try:
            store = await self.run.store()
            try:
                if fault.verb == "pause":
                    await store.client.execute_command("CLIENT", "PAUSE", int(fault.duration_s * 1000), "ALL")
                    await asyncio.sleep(fault.duration_s)
                else:
                    for address in self.run.proxies[victim].addresses:
                        await store.client.execute_command("CLIENT", "KILL", "ADDR", address)
            finally:
                await store.close()
        except (StoreError, RedisError, OSError):  # it is away, by a fault before this one; or that connection is gone
            return False
        return True

    async def _twin(self) -> None:
        """The old trainer wakes when the new one has trained; one of them has to go, whichever was not last to attach."""
        old = self.run.signal("trainer-0", signal.SIGSTOP)
        twin = self.run.start_twin()
        try:
            began, deadline = self.watcher.last.committed, time.monotonic() + self.limit_s
            while self.watcher.last.committed <= began and time.monotonic() < deadline and not self.watcher.violations:
                await asyncio.sleep(POLL_S)
        finally:
            self.run.wake(old)
        deadline = time.monotonic() + self.limit_s
        while twin.poll() is None and time.monotonic() < deadline and not self.watcher.violations:
            await asyncio.sleep(POLL_S)
        if twin.poll() is None and not self.watcher.violations:
            self.watcher.violation(f"two trainers live: a superseded one was not refused within {self.limit_s:g} s")
