"""The common parts of a service process: store, notifications, view of the run, heartbeat, REST endpoints, supervised loops.

Guarantees: the end of the run sets `stopping`, after which loops finish on their own; the pod leaves the fleet when they have.
Opened by services/http/entry.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, ProcessCollector

from services.config import RunConfig
from services.protocol.errors import StoreError
from services.protocol.messages import PodStatus
from services.runtime.activity import Activity
from services.runtime.loops import Loop, end_tasks
from services.runtime.notifications import Notifications
from services.runtime.pod_metrics import PodMetrics
from services.runtime.tracing import TraceRecorder, open_tracing
from services.runtime.view import RunView
from services.store import Store
from services.store.client import AGAIN_S, request_limit_s

LEAVE_LIMIT_S = 3.0
LOOP_LIMIT_S = request_limit_s() + AGAIN_S
"""How long a loop may make no progress. A call to a Redis that hangs ends first: restarting every pod would not help it."""
URGENT = ("phase", "version", "paused", "unreached", "draining")  # others wait for them: sent at once, not with a heartbeat


@dataclass
class Service:
    """One pod of a run. Created by `open_service`."""

    kind: str
    config: RunConfig
    store: Store
    status: PodStatus
    notifications: Notifications = field(default_factory=Notifications)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    loops: list[Loop] = field(default_factory=list)
    app: FastAPI = field(default_factory=FastAPI)  # the endpoints; a service adds its own
    claimers: int = 1  # generators that share the training tickets, as of the last heartbeat
    view: RunView = field(init=False)
    metrics: PodMetrics = field(init=False)
    tracing: TraceRecorder = field(init=False)
    activity: Activity = field(default_factory=Activity)  # what it spends its time on
    stays: bool = False  # stays after the run is over
    ready: Callable[[], str] = lambda: ""  # why the pod is not ready for work; empty if it is

    def __post_init__(self) -> None:
        self.view = RunView(self.store, self.notifications, self.kind)
        self.metrics = PodMetrics(self.registry)
        ProcessCollector(registry=self.registry)
        self.tracing = open_tracing(self.config, self.kind, self.status.name)

    @property
    def folder(self) -> Path:
        """Return the run's folder."""
        return Path(self.config.run.dir) / self.config.run.name

    def say(self, **changes: object) -> None:
        """Change what heartbeats report of this pod, e.g. `say(phase="ready", version=3)`, and send it at once.

        A draining pod keeps reporting that it drains, whatever its loops still do.
        """
        if self.status.phase == "draining":
            changes.pop("phase", None)
        changed = msgspec.structs.replace(self.status, **changes)
        urgent = any(getattr(changed, name) != getattr(self.status, name) for name in URGENT)
        self.status = changed
        if urgent:
            self.notifications.notify("heartbeat")

    def stop(self) -> None:
        """Ask every loop to finish, including those that are waiting."""
        self.stopping.set()
        self.notifications.notify_all()

    def add_loop(self, name: str, body: Callable[[Loop], Awaitable[None]], limit_s: float = LOOP_LIMIT_S) -> Loop:
        """Add a supervised loop; `limit_s` is how long it may make no progress."""
        loop = Loop(name, body, limit_s)
        self.loops.append(loop)
        return loop

    async def run(self, work: Callable[[Loop], Awaitable[None]], limit_s: float = LOOP_LIMIT_S) -> None:
        """Run all loops until `work`, the pod's main loop, returns."""
        loop_of_work = self.add_loop("work", work, limit_s)
        self.add_loop("notifications", self._listen)
        self.add_loop("view", self.view.follow)
        self.add_loop("heartbeat", self._heartbeat, LOOP_LIMIT_S + self.config.fleet.heartbeat_s)
        if not self.stays:
            self.add_loop("end", self._watch_end)
        background = [asyncio.create_task(loop.supervise(), name=loop.name) for loop in self.loops if loop is not loop_of_work]
        main = asyncio.create_task(loop_of_work.supervise(), name="work")
        try:
            waiting = {main, *background}
            while not main.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # raises errors that a retry cannot fix
        finally:
            await end_tasks([main, *background])
            with contextlib.suppress(StoreError, OSError, TimeoutError):
                await asyncio.wait_for(self.store.fleet.leave(self.status), LEAVE_LIMIT_S)

    async def created(self, limit_s: float | None = None) -> bool:
        """Wait until the run exists, which dataprep creates. Returns False if told to stop first, or after `limit_s`."""
        exists, told = asyncio.create_task(self.view.created()), asyncio.create_task(self.stopping.wait())
        try:
            await asyncio.wait([exists, told], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            return exists.done()
        finally:
            await end_tasks([exists, told])

    async def _listen(self, loop: Loop) -> None:
        loop.limit_s = float("inf")  # a quiet subscription is not a fault; a broken connection raises
        await self.notifications.listen(self.store)

    async def _heartbeat(self, loop: Loop) -> None:
        while True:
            status = msgspec.structs.replace(self.status, gauges=self.status.gauges | self.activity.gauges())
            self.claimers = await self.store.fleet.beat(status, self.config.fleet.ttl_s)
            loop.progress()
            await self.notifications.wait("heartbeat", timeout=self.config.fleet.heartbeat_s)

    async def _watch_end(self, loop: Loop) -> None:
        loop.limit_s = float("inf")
        async with self.view.changed:
            await self.view.changed.wait_for(lambda: self.view.ended)
        self.stop()
        await asyncio.Event().wait()


def new_status(kind: str, name: str, phase: str) -> PodStatus:
    """Return the status of this process as a pod that holds nothing yet and has no address."""
    return PodStatus(kind, name, secrets.token_hex(4), socket.gethostname(), os.getpid(), "", phase, -1, 0, {})
