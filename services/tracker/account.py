"""Keeps the account of a run in its folder: the time of each process that holds devices (services/operations/cost.py).

Guarantees: what a pod has reported is on disk within `WRITE_S`; a tracker that is restarted continues from the file.
Waits for: the fleet's heartbeats. Unblocked by: `LOOK_S`, the end of the run.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import structlog

from services.config import RunConfig
from services.operations.cost import Account, read_account, write_account
from services.protocol.errors import StoreError
from services.runtime.activity import DEVICES
from services.runtime.atomic_folders import FolderError
from services.runtime.loops import Loop, is_set_within
from services.store import Store

log = structlog.get_logger()

LOOK_S = 0.5
WRITE_S = 5.0
OTHERS_S = 10.0  # how long to wait for pods that are about to leave
MISSED_BEATS = 3  # a process whose last heartbeat is this many intervals old may have been killed


async def keep_account(
    config: RunConfig, store: Store, folder: Path, stopping: asyncio.Event, done: asyncio.Event, loop: Loop
) -> None:
    """Observe the fleet until `stopping` is set, and then until the others have left, too. Sets `done` at the end."""
    try:
        account = await asyncio.to_thread(read_account, folder)
    except FolderError as error:
        if isinstance(error.__cause__, OSError):
            raise  # a shared file system may be unavailable for a moment: the loop is restarted, and reads it again
        log.warning("starting a new account: earlier time is not included", error=str(error))
        account = Account()
    fleet, written, until = config.fleet, 0.0, float("inf")
    while True:
        last = time.monotonic() >= until
        try:
            heard = await store.fleet.heard(fleet.ttl_s)
            account.observe(heard, time.time(), MISSED_BEATS * fleet.heartbeat_s)
            last = last or (stopping.is_set() and not any(DEVICES in status.gauges for status, _ in heard))
        except StoreError:
            if not stopping.is_set():
                raise
            last = True  # Redis stopped first
        if last:
            account.stop()
        if account.processes and (last or time.monotonic() - written > WRITE_S):
            written = time.monotonic()
            try:
                await asyncio.to_thread(write_account, folder, account)
            except FolderError as error:
                log.warning("the account could not be written, retrying", error=str(error), every_s=WRITE_S)
        loop.progress()
        if last:
            break
        if stopping.is_set():
            until = min(until, time.monotonic() + OTHERS_S)
            await asyncio.sleep(LOOK_S)
            continue
        await is_set_within(stopping, LOOK_S)
    done.set()
