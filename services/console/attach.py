"""Finds a run by name or folder and connects to its Redis, for `grpo status`, `inspect`, `audit`, `pause` and the like.

Guarantees: if the run has its own Redis server and that server is down, one is up on the run's folder while commands read it
(reading/shared_server.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

from services.config import RunConfig, load_resolved
from services.config.generation import Fleet
from services.console import paths
from services.console.errors import EXIT_CONFIG, EXIT_REDIS, ConsoleError
from services.console.local import conditions
from services.console.local.folder import RunFolder, split_password
from services.console.local.lock import LockHolder, holder
from services.console.reading.shared_server import owns_server, reading
from services.operations.condition import Condition, condition
from services.protocol.errors import StoreError
from services.runtime.http.credentials import REDIS_PASSWORD_ENV, redis_login
from services.store import RunState, Store
from services.store.connection.client import Login


@dataclass(frozen=True)
class Attached:
    """A run whose Redis answers."""

    name: str
    store: Store
    ttl_s: float  # a pod without a heartbeat for this long counts as gone
    live: bool  # its Redis was up anyway; requests take effect now or when its services return
    runs: bool  # its services run
    config: RunConfig | None  # None: its folder is not on this machine
    folder: RunFolder | None = None
    holder: LockHolder | None = None  # who holds its folder

    def condition(self, state: RunState | None) -> Condition:
        """Return what the run is doing."""
        return condition(state, live=self.runs, left=conditions.left(self.folder) if self.folder else None)


@contextlib.asynccontextmanager
async def attach(run: str, redis_url: str = "") -> AsyncIterator[Attached]:
    """Attach to a run: a folder, a name under `runs/` or, with `redis_url`, a name in that Redis. Empty: the newest run."""
    folder = find(run) if redis_url else existing_folder(run)
    config = load_resolved(folder.config) if folder else None
    name = config.run.name if config else run
    if not name:
        raise ConsoleError("--redis-url needs a run name: pass it as RUN", EXIT_CONFIG)
    ttl_s = config.fleet.ttl_s if config and not redis_url else Fleet().ttl_s
    if config and folder and not redis_url and owns_server(folder):
        with reading(folder, _say) as served:
            login = Login((folder.redis / "password").read_text(encoding="utf-8").strip())
            async with _store(served.url, name, login) as store:
                runs = not served.holder.readers
                yield Attached(name, store, ttl_s, runs, runs, config, folder, served.holder)
        return
    if redis_url or config is None:
        url, password = split_password(redis_url)
        login = Login(password or os.environ.get(REDIS_PASSWORD_ENV, ""))
    else:
        url, login = config.redis.url, redis_login(config, "console")
    async with _store(url, name, login) as store:
        found = holder(folder.path) if folder else None
        runs = found is not None or bool(await store.fleet.members(ttl_s))
        yield Attached(name, store, ttl_s, True, runs, config, folder, found)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
    found = paths.find(run)
    return RunFolder(found.path, found.given) if found else None


def existing_folder(run: str) -> RunFolder:
    """Do the same as `find`, but raise `ConsoleError` when there is no such folder."""
    found = paths.existing(run)
    return RunFolder(found.path, found.given)


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
