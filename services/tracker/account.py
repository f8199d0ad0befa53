"""Keeps the account of a run, in its folder (services/operations/account.py).

Guarantees: what a pod has reported is on disk within `WRITE_S`; a tracker that is restarted continues from the file.
Waits for: the fleet's heartbeats. Unblocked by: `LOOK_S`, the end of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import structlog

from services.config import RunConfig
from services.operations import account
from services.protocol.errors import StoreError
from services.runtime.atomic_folders import FolderError
from services.runtime.loops import Loop
from services.runtime.processes.activity import DEVICES
from services.store import Store

log = structlog.get_logger()

LOOK_S = 0.5
WRITE_S = 5.0
OTHERS_S = 5.0  # how long to stay for pods that are about to leave


class Accountant:
    """Observes the fleet until `stopping` is set."""

    def __init__(self, config: RunConfig, store: Store, folder: Path, stopping: asyncio.Event) -> None:
        self._config, self._store, self._folder, self._stopping = config, store, folder, stopping
        self._failing = False
        self.done = asyncio.Event()

    async def follow(self, loop: Loop) -> None:
        """Observe until told to stop, and then until the others have left, too."""
        found, written = await asyncio.to_thread(account.read, self._folder), 0.0
        fleet, until = self._config.fleet, float("inf")
        while True:
            if self._stopping.is_set():
                until = min(until, time.monotonic() + OTHERS_S)
            last = time.monotonic() >= until
            try:
                heard = await self._store.fleet.heard(fleet.ttl_s)
                found.observe(heard, time.time(), fleet.heartbeat_s)
                last = last or (self._stopping.is_set() and not any(DEVICES in status.gauges for status, _ in heard))
            except StoreError:
                if not self._stopping.is_set():
                    raise
                last = True  # Redis stopped first
            if found.pods and (last or time.monotonic() - written > WRITE_S):
                written = time.monotonic()
                await asyncio.to_thread(self._write, found)
            loop.progress()
            if last:
                break
            if self._stopping.is_set():
                await asyncio.sleep(LOOK_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._stopping.wait()
        self.done.set()

    def _write(self, found: account.Account) -> None:
        try:
            account.write(self._folder, found)
            self._failing = False
        except FolderError as error:
            if not self._failing:
                log.warning("the account could not be written, retrying", error=str(error), every_s=WRITE_S)
            self._failing = True
