"""Finds a run by name or folder and connects to its Redis, for `grpo status`, `inspect`, `audit`, `pause` and the like.

Guarantees: if the run has its own Redis server and that server is down, one is up on the run's folder while the command runs
(own_server.py). A running run is never shown from its folder alone (`folder_instead`): its Redis is then only unreachable, which
is an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from services.config import RunConfig
from services.config.generation import Fleet
from services.config.secrets import split_password
from services.console import paths
from services.console.commands.own_server import owns_server, reading, usable
from services.console.errors import EXIT_CONFIG, EXIT_REDIS, ConsoleError
from services.console.lock import LockHolder, holder
from services.console.paths import RunPaths
from services.console.printable import say
from services.http.credentials import REDIS_PASSWORD_ENV, redis_login
from services.operations.condition import Condition, condition
from services.protocol.errors import StoreError
from services.store import RunState, Store
from services.store.client import Login

NOTE = "without its Redis: showing the files in its folder"


@dataclass(frozen=True)
class Attached:
    """A run whose Redis answers."""

    name: str
    store: Store
    live: bool
    """Whether its Redis was up already, so that requests take effect now or when its services return."""
    runs: bool
    """Whether its services run."""
    folder: RunPaths | None = None
    """None: it is not on this machine."""
    holder: LockHolder | None = None
    """Who holds its folder."""

    @property
    def config(self) -> RunConfig | None:
        """Return its configuration, or None if its folder is not on this machine."""
        return self.folder.settings if self.folder else None

    @property
    def ttl_s(self) -> float:
        """Return after how many seconds a pod without a heartbeat counts as gone."""
        return (self.config.fleet if self.config else Fleet()).ttl_s

    @property
    def later(self) -> str:
        """End of a message about a request, which a stopped run applies later."""
        return "" if self.live else "; the run is stopped and applies this when it resumes"

    def patience_s(self, wait_s: float) -> float:
        """Return how long to wait for the run to comply: a stopped one does not."""
        return wait_s if self.live else 0.0

    def condition(self, state: RunState | None) -> Condition:
        """Return what the run is doing."""
        return condition(state, live=self.runs, left=self.folder.condition_left() if self.folder else None)


@contextlib.asynccontextmanager
async def attach(run: str, redis_url: str = "") -> AsyncIterator[Attached]:
    """Attach to a run: a folder, a name under `runs/` or, with `redis_url`, a name in that Redis. Empty: the newest run."""
    folder = paths.find(run) if redis_url else paths.existing(run)
    name = folder.settings.run.name if folder else run
    if not name:
        raise ConsoleError("--redis-url needs a run name: pass it as RUN", EXIT_CONFIG)
    if folder and not redis_url and owns_server(folder):
        async with reading(folder, say) as served:
            with usable(folder):
                login = Login((folder.redis / "password").read_text(encoding="utf-8").strip())
            async with _store(served.url, name, login) as store:
                runs = not served.holder.readers
                yield Attached(name, store, runs, runs, folder, served.holder)
        return
    if redis_url or folder is None:
        url, password = split_password(redis_url)
        login = Login(password or os.environ.get(REDIS_PASSWORD_ENV, ""))
    else:
        url, login = folder.settings.redis.url, redis_login(folder.settings, "console")
    async with _store(url, name, login) as store:
        found = holder(folder.path) if folder else None
        attached = Attached(name, store, True, True, folder, found)
        runs = found is not None or bool(await store.fleet.members(attached.ttl_s))
        yield replace(attached, runs=runs)


async def existing(attached: Attached) -> RunState:
    """Return the run's state. Raise `ConsoleError` when there is none."""
    state = await attached.store.run.state()
    if state is None:
        if attached.runs:
            raise ConsoleError(f"run {attached.name} is starting: try again in a few seconds", EXIT_CONFIG)
        raise ConsoleError(
            f"run {attached.name} does not exist in its Redis: it was never started, or it was deleted", EXIT_CONFIG
        )
    return state


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


def folder_instead(run: str, redis_url: str, error: ConsoleError) -> RunPaths:
    """Print `error`, which says why a run's Redis cannot be used, and return its folder.

    Raise it if the run was not trained or is running.
    """
    folder = None if redis_url else paths.find(run)
    gone = error.code in (EXIT_REDIS, EXIT_CONFIG)
    if folder is None or not gone or folder.untrained or folder.condition_now().word in ("running", "paused"):
        raise error
    say(error)
    return folder
