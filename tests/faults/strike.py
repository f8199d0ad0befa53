"""Applies each verb of kinds.py to a real process, connection or server."""

from __future__ import annotations

import asyncio
import signal
import sys
import time

from redis.exceptions import RedisError

from services.console.errors import EXIT_FAILED, EXIT_OK, EXIT_STOPPED
from services.protocol.errors import StoreError
from services.runtime.checkpoints import CheckpointFolder
from tests.faults.kinds import AT_THE_END, AT_THE_START, Fault
from tests.faults.run_under_test import RunUnderTest
from tests.faults.watcher import POLL_S, Watcher

LOST_LIMIT_S, LOST_STEPS = 5.0, 2  # time limit, and minimum steps, of waiting for a call whose reply is to be lost
STARTED_LIMIT_S, ENDED_LIMIT_S = 30.0, 8.0  # limits for a call that a pod makes when it starts or exits


class Strike:
    """Applies faults to `run`; reports violations to `watcher` within `limit_s`."""

    def __init__(self, run: RunUnderTest, watcher: Watcher, limit_s: float) -> None:
        self.run, self.watcher, self.limit_s = run, watcher, limit_s

    def victim(self, fault: Fault) -> str:
        """Return the victim: who leads or stands by is known only at this moment."""
        roles = {"leader": "leading", "standby": "standby"}
        return (self.watcher.last.dataprep(roles[fault.victim]) if fault.victim in roles else fault.victim) or "dataprep-0"

    async def carry_out(self, fault: Fault, victim: str) -> bool:
        """Apply the fault. Return True once it is over, or False if there was no victim."""
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
            case "restore":
                return await self._restore()
            case "break":
                await self._break()
        return True

    async def _kill(self, victim: str, sig: signal.Signals) -> bool:
        """Signal the victim's processes. A SIGTERM to a trainer goes to rank 0, which acts for all ranks."""
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
        """Wait until the reply is lost, long enough for a busy machine: at least until this many more steps are committed."""
        began, since = self.watcher.last.committed, time.monotonic()
        while not lost.is_set() and self.run.ended is None and not self.watcher.violations:
            slow = self.watcher.last.committed < began + steps
            if time.monotonic() - since > (self.limit_s if slow else limit_s):
                return
            await asyncio.sleep(POLL_S)

    async def _command(self, fault: Fault, victim: str) -> bool:
        """Send a command directly to the server, without a store's retries, which would wait until a pause is over."""
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
        except (StoreError, RedisError, OSError):  # it is still down from an earlier fault, or the connection is gone
            return False
        return True

    async def _restore(self) -> bool:
        """Request a restore as a user would; it takes place while the next faults strike."""
        steps = [saved.step for saved in CheckpointFolder(self.run.folder.checkpoints).complete()]
        if not steps:
            return False
        step = max(steps)  # an earlier one may be deleted before the command reads it
        self.watcher.restores.add(step)
        command = [sys.executable, "-m", "services.console.commands", "restore", str(step), str(self.run.folder.path)]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=self.run.setting.code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await process.communicate()
        self.watcher.tell(f"restore {step}: {output.decode(errors='replace').strip()}")
        return process.returncode == EXIT_OK

    async def _break(self) -> None:
        """Make every reward fail, and kill a dataprep meanwhile, until the run has paused and ended; then run it again."""
        self.run.setting.broken.touch()
        try:
            await asyncio.sleep(1.0)
            self.run.signal(self.watcher.last.dataprep("leading"), signal.SIGKILL)
            deadline = time.monotonic() + self.limit_s
            while self.run.ended is None and time.monotonic() < deadline and not self.watcher.violations:
                await asyncio.sleep(POLL_S)
        finally:
            self.run.setting.broken.unlink()
        if self.run.ended is None:
            self.watcher.violation(f"a run whose rewards all fail did not pause within {self.limit_s:g} s")
            return
        if self.run.ended != EXIT_FAILED or "prompts keep failing" not in self.run.log.read_text(errors="replace"):
            self.watcher.violation(f"grpo run, whose rewards all fail, ended with {self.run.ended}: {self.run.last_line}")
        self.run.start()

    async def _twin(self) -> None:
        """Wake the old trainer after the new one has trained. The one that was not the last to attach must exit."""
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
