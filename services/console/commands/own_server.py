"""Reaches the Redis server of a run on this machine, to read or control the run, whether it is running or not.

Guarantees: the run's own server is used if it is up. Otherwise the command serves the run's folder itself under the folder's
lock, and commands that come meanwhile use that server. It ends after them, `OTHERS_S` after the command at the latest, and at
once when a run starts, which sends SIGUSR1.
Waits for: the server. Unblocked by: what holds the folder, asked every `POLL_S`; each wait is announced with its reason, has a
limit and can be cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from services.console.errors import EXIT_REDIS, ConsoleError
from services.console.lock import FolderLock, InUse, LockHolder, holder, users
from services.console.paths import RunPaths
from services.console.run.redis_server import start_server
from services.protocol.errors import StoreError
from services.runtime.redis_process import START_LIMIT_S

POLL_S = 0.02
SAID_AFTER_S = 2.0  # a longer wait is reported; a server starts in less, even on a busy machine
CONNECT_S = 1.0
OTHERS_S = 10.0  # for other commands to be done with this one's server


@dataclass(frozen=True)
class Reading:
    """A server that answers."""

    url: str
    holder: LockHolder
    """Who keeps it up: the run, or a command that reads it."""


@contextlib.asynccontextmanager
async def reading(folder: RunPaths, say: Callable[[str], None]) -> AsyncIterator[Reading]:
    """Reach the run's own server, or serve its folder if the run is stopped. Raise `ConsoleError` if it does not answer.

    `say` receives what is waited for.
    """
    with usable(folder):
        readers = os.open(folder.path / "readers", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    held = contextlib.ExitStack()
    try:
        while not _locked(readers, fcntl.LOCK_SH):  # the server of earlier readers is ending
            await asyncio.sleep(POLL_S)
        with usable(folder):
            found = await _find(folder, say, held)
        yield found
        deadline = time.monotonic() + OTHERS_S
        while found.holder.pid == os.getpid() and not _locked(readers, fcntl.LOCK_EX) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
    finally:
        held.close()
        os.close(readers)


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


async def _find(folder: RunPaths, say: Callable[[str], None], held: contextlib.ExitStack) -> Reading:
    """Wait for a server that answers. Start one if no process holds the folder; it ends with `held`."""
    began, said = time.monotonic(), False
    while True:
        found = holder(folder.path)
        if found is None:
            with contextlib.suppress(InUse):
                return _serve(folder, held)
        elif found.port and found.lives:  # otherwise the port is of a server that has ended
            return Reading(f"redis://127.0.0.1:{found.port}/0", found)
        elif found.lives and not found.readers and _answers(url := folder.settings.redis.url):
            return Reading(url, found)
        waited_s = time.monotonic() - began
        if found is not None and waited_s > SAID_AFTER_S and not said:
            said = True
            say(f"waiting up to {START_LIMIT_S:g} s for {_awaited(folder.path, found)}")
        if waited_s > START_LIMIT_S:
            what = _awaited(folder.path, found) if found else "its Redis server"
            raise ConsoleError(f"{folder.path}: gave up after {START_LIMIT_S:g} s waiting for {what}", EXIT_REDIS)
        await asyncio.sleep(POLL_S)


def _serve(folder: RunPaths, held: contextlib.ExitStack) -> Reading:
    """Serve a run's folder until `held` is closed, by the command or by a run that starts. Raise `InUse` if it is in use."""
    held.callback(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, lambda *_: held.close()))
    lock = held.enter_context(FolderLock(folder.path, readers=True))
    try:
        server = start_server(folder.redis, folder.path.name)
    except StoreError as error:
        raise ConsoleError(str(error), EXIT_REDIS) from None
    held.callback(server.stop)
    lock.note(server.port)
    return Reading(server.url, LockHolder(os.getpid(), True, True, server.port))


def _locked(file: int, kind: int) -> bool:
    """Lock a file, and return whether that succeeded: readers share it, and the command whose server they use takes it last."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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
