"""What every service process is: a store, a bell, a view of the run, a heartbeat, REST endpoints and supervised loops.

Guarantees: SIGTERM and the end of the run set `stopping`, upon which loops come to an end by themselves; the pod leaves
the fleet before it exits; a failure that no retry can mend exits with a code and one line (EXIT_* below).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from services.protocol.config import RunConfig, load_resolved
from services.protocol.errors import DifferentRun, Fenced, OutOfOrder, StoreError
from services.protocol.messages import PodStatus
from services.protocol.store import Store
from services.runtime import logs
from services.runtime.api import serve
from services.runtime.auth import api_token, redis_password
from services.runtime.bell import Bell
from services.runtime.loops import FATAL, Broken, Loop, end_tasks
from services.runtime.view import RunView

log = structlog.get_logger()

EXIT_OK, EXIT_FAILED, EXIT_CONFIG, EXIT_REDIS = 0, 1, 2, 3
LEAVE_LIMIT_S = 3.0


@dataclass
class Service:
    """One pod of a run. Made by `open_service`."""

    kind: str
    config: RunConfig
    store: Store
    status: PodStatus
    bell: Bell = field(default_factory=Bell)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    loops: list[Loop] = field(default_factory=list)
    app: FastAPI = field(default_factory=FastAPI)  # the endpoints; a service adds its own
    view: RunView = field(init=False)
    ready: Callable[[], str] = lambda: ""  # why the pod would not do work now; empty: it would

    def __post_init__(self) -> None:
        self.view = RunView(self.store, self.bell, self.kind)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.run.dir) / self.config.run.name

    def say(self, **changes: object) -> None:
        """Change what the next heartbeat says of this pod, e.g. `say(phase="ready", version=3)`, and send it at once."""
        changed = replace_status(self.status, **changes)
        urgent = (changed.phase, changed.version) != (self.status.phase, self.status.version)
        self.status = changed
        if urgent:
            self.bell.ring("heartbeat")

    def stop(self) -> None:
        """Ask every loop to come to an end, those that wait too."""
        self.stopping.set()
        self.bell.ring_all()

    def add_loop(self, name: str, body: Callable[[Loop], Awaitable[None]], limit_s: float = 30.0) -> Loop:
        """Add a supervised loop; `limit_s` is how long it may make no progress."""
        loop = Loop(name, body, limit_s)
        self.loops.append(loop)
        return loop

    async def run(self, work: Callable[[Loop], Awaitable[None]], limit_s: float = 60.0) -> None:
        """Run all loops until `work`, the pod's main loop, returns."""
        loop_of_work = self.add_loop("work", work, limit_s)
        self.add_loop("bell", self._listen)
        self.add_loop("view", self.view.follow)
        self.add_loop("heartbeat", self._heartbeat, 30.0 + self.config.fleet.heartbeat_s)
        self.add_loop("end", self._watch_end)
        background = [asyncio.create_task(loop.supervise(), name=loop.name) for loop in self.loops if loop is not loop_of_work]
        main = asyncio.create_task(loop_of_work.supervise(), name="work")
        try:
            waiting = {main, *background}
            while not main.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # raises what no retry can mend
        finally:
            await end_tasks([main, *background])
            with contextlib.suppress(StoreError, OSError, TimeoutError):
                await asyncio.wait_for(self.store.leave(self.status), LEAVE_LIMIT_S)

    async def created(self, limit_s: float | None = None) -> bool:
        """Wait until the run exists, which dataprep sees to. False: told to stop before, or `limit_s` passed."""
        exists, told = asyncio.create_task(self._exists()), asyncio.create_task(self._told_to_stop())
        try:
            await asyncio.wait([exists, told], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            return exists.done()
        finally:
            await end_tasks([exists, told])

    async def _exists(self) -> None:
        await self.view.created()

    async def _told_to_stop(self) -> None:
        await self.stopping.wait()

    async def _listen(self, loop: Loop) -> None:
        loop.limit_s = float("inf")  # silence is no fault of a bell; a broken connection raises
        await self.bell.listen(self.store)

    async def _heartbeat(self, loop: Loop) -> None:
        while True:
            await self.store.beat(self.status, self.config.fleet.ttl_s)
            loop.progress()
            await self.bell.wait("heartbeat", timeout=self.config.fleet.heartbeat_s)

    async def _watch_end(self, loop: Loop) -> None:
        loop.limit_s = float("inf")
        async with self.view.changed:
            await self.view.changed.wait_for(lambda: self.view.ended)
        self.stop()
        await asyncio.Event().wait()


def replace_status(status: PodStatus, **changes: object) -> PodStatus:
    """A copy of a status with some fields changed."""
    fields = {name: getattr(status, name) for name in status.__struct_fields__}
    return PodStatus(**{**fields, **changes})


@contextlib.asynccontextmanager
async def open_service(kind: str, config: RunConfig, name: str) -> AsyncIterator[Service]:
    """A service with its store connected, its REST endpoints up and SIGTERM handled."""
    token = api_token(config)
    store = await Store.connect(config.redis.url, config.run.name, redis_password(config))
    status = PodStatus(
        kind=kind, name=name, boot=secrets.token_hex(4), host=socket.gethostname(), pid=os.getpid(), url="",
        phase="starting", version=-1, world=0, gauges={},
    )  # fmt: skip
    service = Service(kind, config, store, status)
    with contextlib.suppress(ValueError, RuntimeError):  # only the main thread may handle signals; the trainer does its own
        for sig in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(sig, service.stop)
    try:
        async with serve(service, token) as url:
            service.say(url=url)
            yield service
    finally:
        await store.close()


@dataclass(frozen=True)
class Arguments:
    """How a service process is started: the resolved configuration and the pod's name."""

    config: RunConfig
    name: str


def arguments(kind: str, argv: list[str] | None = None) -> Arguments:
    """Parse a service's command line; environment GRPO_CONFIG and GRPO_POD stand in for the options."""
    import argparse

    parser = argparse.ArgumentParser(prog=f"python -m services.{kind}", description=f"The {kind} service of a run.")
    parser.add_argument(
        "--config", default=os.environ.get("GRPO_CONFIG"), help="resolved configuration (TOML); default $GRPO_CONFIG"
    )
    parser.add_argument(
        "--name", default=os.environ.get("GRPO_POD", socket.gethostname()), help="name of this pod; default $GRPO_POD"
    )
    options = parser.parse_args(argv)
    if not options.config:
        parser.error("--config or GRPO_CONFIG is required")
    return Arguments(load_resolved(options.config), options.name)


def main(kind: str, work: Callable[[Arguments], Awaitable[None]], argv: list[str] | None = None) -> int:
    """Entry of a service process: set up logs, run `work`, turn errors into one line and an exit code."""
    try:
        given = arguments(kind, argv)
        logs.configure(given.config.run.name, given.name)
        asyncio.run(work(given))  # type: ignore[arg-type]
    except KeyboardInterrupt:
        return EXIT_OK
    except (*FATAL, StoreError) as error:
        return report(error)
    return EXIT_OK


def report(error: BaseException) -> int:
    """Print an error a person can act on; the exit code for it. Only EXIT_FAILED is worth another try."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    if isinstance(error, Broken):
        return EXIT_FAILED
    if isinstance(error, Fenced | OutOfOrder):
        return EXIT_FAILED  # out of step with the run: a new process reads it anew
    redis = isinstance(error, StoreError) and not isinstance(error, DifferentRun)
    return EXIT_REDIS if redis else EXIT_CONFIG
