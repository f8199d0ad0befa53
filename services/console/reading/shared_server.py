"""Reaches the Redis server of a run on this machine, to read or control the run, whether it is running or not.

Guarantees: the run's own server is used if it is up. Otherwise all readers share one on the run's folder, started by the first
and shut down after the last (keeper.py). Each wait is announced with its reason, has a limit, and can be cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from services.console.errors import EXIT_REDIS, ConsoleError
from services.console.lock import LockHolder, holder, users
from services.console.paths import RunPaths
from services.console.reading.presence import Presence
from services.runtime.redis_process import START_LIMIT_S

POLL_S = 0.02
SAID_AFTER_S = 2.0  # a longer wait is reported; a keeper and a server start in less, even on a busy machine
CONNECT_S = 1.0
END_S = 10.0  # for the server to shut down after its last reader


@dataclass(frozen=True)
class Reading:
    """A server that answers."""

    url: str
    holder: LockHolder
    """Who keeps it up: the run, or a keeper for readers."""


@contextlib.asynccontextmanager
async def reading(folder: RunPaths, say: Callable[[str], None]) -> AsyncIterator[Reading]:
    """Reach the run's own server, and keep it up meanwhile if the run is stopped. Raise `ConsoleError` if it does not answer.

    `say` receives what is waited for.
    """
    found, keepers = None, list[subprocess.Popen[str]]()
    with usable(folder):
        presence = Presence(folder.path)
    try:
        while not presence.join():
            await asyncio.sleep(POLL_S)
        with usable(folder):
            found = await _find(folder, say, keepers)
        yield found
    finally:
        last = presence.leave()
        presence.close()
        for keeper in keepers:
            _see_out(keeper, END_S if last and found else 0.0)


@contextlib.contextmanager
def usable(folder: RunPaths) -> Iterator[None]:
    """Raise a `ConsoleError` for what the system refuses, for example in the folder of another user or on a read-only disk."""
    try:
        yield
    except OSError as error:
        raise ConsoleError(f"the Redis server of {folder.path} cannot be used: {error}", EXIT_REDIS) from None


def owns_server(folder: RunPaths) -> bool:
    """Return whether the run has a Redis server of its own."""
    return (folder.redis / "password").exists()


async def _find(folder: RunPaths, say: Callable[[str], None], keepers: list[subprocess.Popen[str]]) -> Reading:
    """Wait for a server that answers. Start a keeper of one if no process holds the folder, and add it to `keepers`."""
    began, told = time.monotonic(), False
    while True:
        found = holder(folder.path)
        if found is None:
            _keep(folder, keepers)
        elif found.port and found.lives:  # otherwise the port is of a keeper that has ended, and the next has not written its own
            return Reading(f"redis://127.0.0.1:{found.port}/0", found)
        elif found.lives and not found.readers and _answers(url := folder.keys("redis.url")[0]):
            return Reading(url, found)
        waited_s = time.monotonic() - began
        if found is not None and waited_s > SAID_AFTER_S and not told:
            told = True
            say(f"waiting up to {START_LIMIT_S:g} s for {_awaited(folder.path, found)}")
        if waited_s > START_LIMIT_S:
            what = _awaited(folder.path, found) if found else "its Redis server"
            raise ConsoleError(f"{folder.path}: gave up after {START_LIMIT_S:g} s waiting for {what}", EXIT_REDIS)
        await asyncio.sleep(POLL_S)


def _keep(folder: RunPaths, keepers: list[subprocess.Popen[str]]) -> None:
    """Start a keeper unless one is starting. Raise `ConsoleError` with the last one's message, if it failed."""
    if keepers and keepers[-1].poll() is None:
        return
    if keepers and keepers[-1].returncode:
        assert keepers[-1].stderr is not None
        raise ConsoleError(keepers[-1].stderr.read().strip() or f"{folder.redis} could not be served", EXIT_REDIS)
    from services.console.run.redis_server import RedisServer

    server = RedisServer(folder.redis, run=folder.path.name)
    keeper = subprocess.Popen(
        [sys.executable, "-m", "services.console.reading.keeper", str(folder.path.resolve())],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    keepers.append(keeper)
    assert keeper.stdin is not None
    with contextlib.suppress(BrokenPipeError), keeper.stdin:  # its end says why
        json.dump({"program": server.program, "password": server.password, "options": server.options()}, keeper.stdin)


def _see_out(keeper: subprocess.Popen[str], limit_s: float) -> None:
    """Wait until the keeper has shut the server down, so that all of the run is on disk when the command returns."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        keeper.wait(limit_s)
    if keeper.stderr is not None:
        keeper.stderr.close()


def _awaited(folder: Path, found: LockHolder) -> str:
    """Describe what must happen before the run can be read."""
    if found.readers:
        return f"the Redis server of {folder}, which process {found.pid} starts"
    if found.lives:
        return f"the Redis server of {folder}, which grpo run (process {found.pid}) starts or stops"
    return f"{users(folder, found)} to exit"


def _answers(url: str) -> bool:
    """Return whether something listens at an address."""
    place = urlsplit(url)
    try:
        socket.create_connection((place.hostname or "", place.port or 6379), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True
