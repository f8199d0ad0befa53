"""Finds a run by name or folder and connects to its Redis, for `grpo status`, `inspect`, `audit`, `pause` and the like.

Guarantees: if the run has its own Redis server and that server is down, it is started on the run's folder while the command
runs, under the folder's lock, and shut down cleanly afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from services.config import RunConfig, load_resolved
from services.config.generation import Fleet
from services.console.errors import EXIT_CONFIG, EXIT_REDIS, ConsoleError
from services.console.local.folder import RunFolder, split_password
from services.console.local.lock import FolderLock, InUse
from services.console.local.redis_server import RedisServer
from services.console.local.run import start_server
from services.protocol.errors import StoreError
from services.runtime.entry import CONFIG_ENV
from services.runtime.http.credentials import REDIS_PASSWORD_ENV, redis_login
from services.store import RunState, Store
from services.store.connection.client import Login

RUNS = Path("runs")  # default of run.dir


@dataclass(frozen=True)
class Attached:
    """A run whose Redis answers."""

    name: str
    store: Store
    ttl_s: float  # a pod without a heartbeat for this long counts as gone
    live: bool  # its Redis was already running; this command did not start it
    config: RunConfig | None  # None: its folder is not on this machine
    folder: RunFolder | None = None


@contextlib.asynccontextmanager
async def attach(run: str, redis_url: str = "") -> AsyncIterator[Attached]:
    """Attach to a run: a folder, a name under `runs/` or, with `redis_url`, a name in that Redis. Empty: the newest run."""
    folder = find(run)
    if redis_url:
        config = load_resolved(folder.config) if folder else None
        name = config.run.name if config else run
        if not name:
            raise ConsoleError("--redis-url needs a run name: pass it as RUN", EXIT_CONFIG)
        url, password = split_password(redis_url)
        async with _store(url, name, Login(password or os.environ.get(REDIS_PASSWORD_ENV, ""))) as store:
            yield Attached(name, store, Fleet().ttl_s, True, config, folder)
        return
    folder = existing_folder(run)
    config = load_resolved(folder.config)
    with _awake(folder, config.redis.appendfsync) as server:
        url, login = (server.url, Login(server.password)) if server else (config.redis.url, redis_login(config, "console"))
        async with _store(url, config.run.name, login) as store:
            yield Attached(config.run.name, store, config.fleet.ttl_s, server is None, config, folder)


async def existing(attached: Attached) -> RunState:
    """Return the run's state. Raise `ConsoleError` when there is none."""
    state = await attached.store.run.state()
    if state is None:
        raise ConsoleError(
            f"run {attached.name} does not exist in its Redis: it was never started, or it was deleted", EXIT_CONFIG
        )
    return state


def later(attached: Attached) -> str:
    """Return the end of a message about a request, which a stopped run applies later."""
    return "" if attached.live else "; the run is stopped and applies this when it resumes"


def find(run: str) -> RunFolder | None:
    """Return the folder of a run, by path or name. For an empty name: that of the run this pod belongs to, or the newest."""
    if not run and (given := os.environ.get(CONFIG_ENV)):
        return RunFolder(RunFolder.of(load_resolved(given)).path, Path(given))
    if not run:
        configs = sorted(RUNS.glob("*/config.toml"), key=lambda path: path.stat().st_mtime)
        return RunFolder(configs[-1].parent) if configs else None
    candidates = [RunFolder(Path(run)), RunFolder(RUNS / run)]
    return next((folder for folder in candidates if folder.config.is_file()), None)


def existing_folder(run: str) -> RunFolder:
    """Do the same as `find`, but raise `ConsoleError` when there is no such folder."""
    folder = find(run)
    if folder is None:
        raise ConsoleError(_unknown(run), EXIT_CONFIG)
    return folder


def _unknown(run: str) -> str:
    known = ", ".join(sorted(path.parent.name for path in RUNS.glob("*/config.toml"))) or "none"
    what = f"no run {run!r}" if run else "no run"
    return f"{what} found: give a run folder, or a name under {RUNS}/ (existing: {known})"


@contextlib.contextmanager
def _awake(folder: RunFolder, appendfsync: str) -> Iterator[RedisServer | None]:
    """Start the run's own server for the duration; yield None when it is already up or the run uses an external server."""
    if not (folder.redis / "password").exists():
        yield None
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(FolderLock(folder.path))
        except InUse:
            yield None
            return
        server = start_server(folder, appendfsync)
        stack.callback(server.stop)
        yield server


@contextlib.asynccontextmanager
async def _store(url: str, name: str, login: Login) -> AsyncIterator[Store]:
    try:
        store = await Store.connect(url, name, login)
    except StoreError as error:
        raise ConsoleError(str(error), EXIT_REDIS) from None
    try:
        yield store
    finally:
        await asyncio.shield(store.close())
