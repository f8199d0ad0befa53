"""Entry point of a service process: parses the command line, opens and closes the service, turns errors into exit codes.

Guarantees: SIGTERM sets the service's `stopping`; inside `leaving_at_once`, before any work has begun, it ends the process with a
line that says so; a process that has done its work exits with its own code, whatever signal still arrives; a failure that a retry
cannot fix exits with a code and one line (EXIT_* below). The first connection to Redis is retried for GRPO_START_S seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import structlog

from services.config import ConfigError, RunConfig, load_resolved
from services.http.credentials import api_tokens, redis_login
from services.protocol.errors import DifferentRun, Fenced, OutOfOrder, RedisUnreachable, StoreError
from services.runtime import logs
from services.runtime.exits import ERROR_PREFIX, EXIT_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_REDIS, EXIT_UNLOADED, one_line
from services.runtime.loops import FATAL, Broken, Loop, is_set_within
from services.runtime.process_tools import CONFIG_ENV
from services.store import Store

if TYPE_CHECKING:
    from services.runtime.service import Service

log = structlog.get_logger()

START_ENV = "GRPO_START_S"
"""Variable with the seconds for which the first connection to Redis is retried; unset: it fails within seconds. On a cluster all
pods start at once, and those that need Redis often before it."""
START_POLL_S, START_LOG_S = 1.0, 15.0
REST_POLL_S = 2.0  # how often a pod whose run is over checks whether it resumed


async def load_pod(service: Service, loop: Loop, load: Callable[[], Awaitable[None]]) -> bool:
    """Load what a pod works with, without a time limit, and wait until the run exists. Returns False if told to stop first."""
    service.say(phase="loading")
    loop.limit_s = float("inf")
    with leaving_at_once():
        if service.stopping.is_set():
            return False
        await load()
    return await service.created()


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """Inside this block, SIGTERM ends the process as soon as its main thread runs Python, with EXIT_UNLOADED and a line that says
    so: no work has begun yet.

    Loading a model takes minutes, and the first process of a container ignores a signal without a handler. Trainer ranks, which
    are never the first process, do not need this: they wait for one another in calls that run no handler.
    """

    began = time.monotonic()

    def leave(*_: object) -> None:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, unloaded(time.monotonic() - began).encode())
        if os.getpgrp() == os.getpid():  # true except in a developer's shell: also ends what this process has started
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.killpg(0, signal.SIGTERM)
        os._exit(EXIT_UNLOADED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def unloaded(after_s: float) -> str:
    """Return the last line of a process that was stopped while it started."""
    return (
        f"ended by SIGTERM while starting, after {after_s:.0f} s, before any work had begun; on a cluster the pod was removed, "
        "or its startup probe failed for too long (startupSeconds)\n"
    )


def end_process(code: int) -> NoReturn:
    """End this process, whose work is done, with an exit code that a late SIGTERM cannot change.

    Threads and exit handlers run as usual, but the interpreter does not free its modules: with an engine's libraries loaded
    that takes seconds, in which devices are held and a cluster sends SIGTERM, because the drain is over.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)


async def connect(kind: str, config: RunConfig) -> Store:
    """Connect to the run's Redis. While it cannot be reached, retry for GRPO_START_S seconds. Raises `StoreError`."""
    login = redis_login(config, kind)
    began, told = time.monotonic(), float("-inf")
    while True:
        try:
            return await Store.connect(config.redis.url, config.run.name, login)
        except RedisUnreachable as error:
            waited_s = time.monotonic() - began
            if waited_s >= start_limit_s():
                raise
            if waited_s >= told + START_LOG_S:
                told = waited_s
                log.warning("waiting for Redis", error=str(error), waited_s=round(waited_s), limit_s=start_limit_s())
        await asyncio.sleep(START_POLL_S)


def start_limit_s() -> float:
    """Return the value of GRPO_START_S, 0 if it is unset. Raises `ConfigError` unless it is a number."""
    try:
        return float(os.environ.get(START_ENV) or 0)
    except ValueError:
        raise ConfigError(f"{START_ENV} = {os.environ[START_ENV]!r} must be a number of seconds") from None


@contextlib.asynccontextmanager
async def open_service(kind: str, config: RunConfig, name: str) -> AsyncIterator[Service]:
    """Open a service with its store connected, its REST endpoints up and SIGTERM handled."""
    from services.http.api import serve  # these import FastAPI, which a cluster's hooks and trainer nodes do without
    from services.runtime.service import Service, new_status

    tokens = api_tokens(config)
    store = await connect(kind, config)
    service = Service(kind, config, store, new_status(kind, name, "starting"))
    loop = asyncio.get_running_loop()
    before = {sig: signal.getsignal(sig) for sig in (signal.SIGTERM, signal.SIGINT)}
    handled = threading.current_thread() is threading.main_thread()  # other threads cannot; the trainer handles its own
    for sig in before if handled else ():
        loop.add_signal_handler(sig, service.stop)
    try:
        async with serve(service, tokens) as url:
            service.say(url=url)
            yield service
    finally:
        await asyncio.to_thread(service.tracing.close)
        await store.close()
        for sig, handler in before.items() if handled else ():  # last: what was begun ends in order
            loop.remove_signal_handler(sig)
            signal.signal(sig, handler)


@dataclass(frozen=True)
class Arguments:
    """How a service process is started: the resolved configuration and the pod's name."""

    config: RunConfig
    name: str
    path: str = ""  # path of the configuration
    stay: bool = False  # stay idle after the run is over: on a cluster a process that exits is restarted


def arguments(kind: str, argv: list[str] | None = None) -> Arguments:
    """Parse a service's command line; the environment variables GRPO_CONFIG and GRPO_POD provide defaults."""
    parser = argparse.ArgumentParser(prog=f"python -m services.{kind}", description=f"Run the {kind} service of a run.")
    parser.add_argument(
        "--config", default=os.environ.get(CONFIG_ENV), help=f"resolved configuration (TOML); default ${CONFIG_ENV}"
    )
    parser.add_argument(
        "--name", default=os.environ.get("GRPO_POD", socket.gethostname()), help="name of this pod; default $GRPO_POD"
    )
    parser.add_argument("--stay", action="store_true", help="after the run is over, stay and wait for a restore to a checkpoint")
    options = parser.parse_args(argv)
    if not options.config:
        parser.error(f"--config or {CONFIG_ENV} is required")
    return Arguments(load_resolved(options.config), options.name, options.config, options.stay)


async def rest(kind: str, given: Arguments) -> bool:
    """With `--stay`: while the run is over, serve the endpoints and do nothing else.

    Returns True if told to stop, False if there is work to do. A pod whose run has ended exits, is restarted, and idles here, so
    the memory of its engine or its ranks is free. It is ready, since it waits for nothing; so a finished run's release can be
    upgraded.
    """
    if not given.stay:
        return False
    async with open_service(kind, given.config, given.name) as service:
        while (state := await service.view.refresh()) and state.finished:
            service.say(phase="finished")
            if await is_set_within(service.stopping, REST_POLL_S):
                return True
        return service.stopping.is_set()


def main(
    kind: str,
    work: Callable[[Arguments], Awaitable[None]],
    argv: list[str] | None = None,
    before: Callable[[Arguments], None] | None = None,
    rests: bool = True,
) -> int:
    """Run a service process: set up logs, run `work`, turn errors into one line and an exit code.

    `before`: what has to happen while the process has no event loop, threads and connections yet. `rests`: whether it idles, with
    `--stay`, while the run is over (`rest`); otherwise `work` continues.
    """
    try:
        with leaving_at_once():
            given = arguments(kind, argv)
            logs.configure(given.config.run.name, given.name)
            if before is not None:
                before(given)
            asyncio.run(_live(kind, given, work, rests))
    except KeyboardInterrupt:
        return EXIT_OK
    except (*FATAL, StoreError) as error:
        return report(error)
    return EXIT_OK


async def _live(kind: str, given: Arguments, work: Callable[[Arguments], Awaitable[None]], rests: bool) -> None:
    if not (rests and await rest(kind, given)):
        await work(given)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the work is done: `leaving_at_once` no longer applies


def report(error: BaseException) -> int:
    """Print an actionable error and return its exit code. Only EXIT_FAILED is worth a retry."""
    print(f"{ERROR_PREFIX}{one_line(str(error))}", file=sys.stderr, flush=True)
    if isinstance(error, Broken | Fenced | OutOfOrder):  # out of step with the run: a new process reads the state again
        return EXIT_FAILED
    redis = isinstance(error, StoreError) and not isinstance(error, DifferentRun)
    return EXIT_REDIS if redis else EXIT_CONFIG
