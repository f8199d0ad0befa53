"""Keeps the account of a run, in its folder (services/operations/account.py).

Guarantees: what a pod has reported is on disk within `WRITE_S`; a tracker that is restarted continues from the file, and renames
one that it cannot read to `UNREADABLE`. A process of this machine is accounted for until it has ended, which takes seconds after
it has left the fleet.
Waits for: the fleet's heartbeats. Unblocked by: `LOOK_S`, the end of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Collection, Iterable
from pathlib import Path

import structlog

from services.config import RunConfig
from services.operations import account
from services.protocol.errors import StoreError
from services.protocol.messages import PodStatus
from services.runtime.activity import DEVICES, PREFIX, process_age_s
from services.runtime.atomic_folders import FolderError
from services.runtime.loops import Loop
from services.store import Store

log = structlog.get_logger()

LOOK_S = 0.5
LAST_LOOKS_S = 0.1  # while the others end
WRITE_S = 5.0
OTHERS_S = 10.0  # how long to wait for pods that are about to leave and end
READS = 10  # attempts to read the account, `LOOK_S` apart, since a shared file system may be unavailable for a moment
UNREADABLE = account.FILE + ".unreadable"
"""Name of an account that could not be read."""
SAME_S = 1.0  # a process that began at another time than the pod reported is another one


class Neighbours:
    """The pods' processes on this machine, whose end can be observed."""

    def __init__(self) -> None:
        self._host = socket.gethostname()
        self._there: dict[tuple[str, str], tuple[int, float]] = {}  # ID of each one's process, and its start time

    def meet(self, heard: Iterable[tuple[PodStatus, float]]) -> None:
        """Note which of the live pods have processes on this machine."""
        for status, age_s in heard:
            if status.host != self._host or status.pid == os.getpid() or DEVICES not in status.gauges:
                continue
            spent_s = sum(seconds for name, seconds in status.gauges.items() if name.startswith(PREFIX))
            there_s = process_age_s(status.pid)
            if there_s and abs(there_s - spent_s - age_s) < SAME_S:
                self._there[status.name, status.boot] = status.pid, time.clock_gettime(time.CLOCK_BOOTTIME) - there_s

    def left(self) -> list[tuple[str, str]]:
        """Return the pods, with the names of their processes, that have not ended."""
        self._there = {key: (pid, began_s) for key, (pid, began_s) in self._there.items() if _lives(pid, began_s)}
        return list(self._there)


def _lives(pid: int, began_s: float) -> bool:
    """Return whether the process that started then is alive; another one may have its ID by now."""
    age_s = process_age_s(pid)
    return bool(age_s) and abs(time.clock_gettime(time.CLOCK_BOOTTIME) - age_s - began_s) < SAME_S


class Accountant:
    """Observes the fleet until `stopping` is set."""

    def __init__(self, config: RunConfig, store: Store, folder: Path, stopping: asyncio.Event) -> None:
        self._config, self._store, self._folder, self._stopping = config, store, folder, stopping
        self._failing, self._neighbours = False, Neighbours()
        self.done = asyncio.Event()

    async def follow(self, loop: Loop) -> None:
        """Observe until told to stop, and then until the others have left, too."""
        found, written = await self._read(loop), 0.0
        fleet, until = self._config.fleet, float("inf")
        while True:
            if self._stopping.is_set():
                until = min(until, time.monotonic() + OTHERS_S)
            last = time.monotonic() >= until
            try:
                heard = await self._store.fleet.heard(fleet.ttl_s)
                found.observe(heard, time.time(), fleet.heartbeat_s)
                self._neighbours.meet(heard)
                ending = self._see_off(found, {(status.name, status.boot) for status, _ in heard})
                there = ending or any(DEVICES in status.gauges for status, _ in heard)
                last = last or (self._stopping.is_set() and not there)
            except StoreError:
                if not self._stopping.is_set():
                    raise
                last = True  # Redis stopped first
            if last:
                found.stop()
            if found.pods and (last or time.monotonic() - written > WRITE_S):
                written = time.monotonic()
                await asyncio.to_thread(self._write, found)
            loop.progress()
            if last:
                break
            if self._stopping.is_set():
                await asyncio.sleep(LAST_LOOKS_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._stopping.wait()
        self.done.set()

    def _see_off(self, found: account.Account, heard: Collection[tuple[str, str]]) -> bool:
        """Account for processes that left the fleet but have not ended. Return whether there are any."""
        left = [key for key in self._neighbours.left() if key not in heard]
        for name, boot in left:
            found.lives_on(name, boot, time.time())
        return bool(left)

    async def _read(self, loop: Loop) -> account.Account:
        """Return the account so far; after several failed attempts a new one, moving the other aside."""
        for attempt in range(1, READS + 1):
            try:
                return await asyncio.to_thread(account.read, self._folder)
            except FolderError as error:
                loop.progress()
                if attempt == READS:
                    kept = self._folder / UNREADABLE
                    (self._folder / account.FILE).replace(kept)
                    log.warning("starting a new account: earlier time is not included", error=str(error), moved_to=str(kept))
            await asyncio.sleep(LOOK_S)
        return account.Account()

    def _write(self, found: account.Account) -> None:
        try:
            account.write(self._folder, found)
            self._failing = False
        except FolderError as error:
            if not self._failing:
                log.warning("the account could not be written, retrying", error=str(error), every_s=WRITE_S)
            self._failing = True
