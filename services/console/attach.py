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
from functools import cached_property
from typing import TYPE_CHECKING, Any

from services.console import paths
from services.console.errors import EXIT_CONFIG, EXIT_REDIS, ConsoleError
from services.console.lock import LockHolder, holder
from services.console.paths import RunPaths
from services.console.reading.shared_server import owns_server, reading, usable
from services.console.run import conditions
from services.http.credentials import REDIS_PASSWORD_ENV, login_of
from services.operations.condition import Condition, condition
from services.protocol.errors import StoreError
from services.store import RunState, Store
from services.store.connection.client import Login, split_password

if TYPE_CHECKING:
    from services.config import RunConfig


@dataclass(frozen=True)
class Attached:
    """A run whose Redis answers."""

    name: str
    store: Store
    ttl_s: float  # a pod without a heartbeat for this long counts as gone
    live: bool  # its Redis was up already; requests take effect now or when its services return
    runs: bool  # its services run
    folder: RunPaths | None = None  # None: it is not on this machine
    holder: LockHolder | None = None  # who holds its folder

    @cached_property
    def config(self) -> RunConfig | None:
        """Return its configuration; None: its folder is not on this machine. It takes longer to load than most commands run."""
        from services.config import load_resolved

        return load_resolved(self.folder.config) if self.folder else None

    def key(self, name: str) -> Any:
        """Return a key of its configuration, such as `fleet.scaling`; None: its folder is not on this machine."""
        return self.folder.keys(name)[0] if self.folder else None

    def condition(self, state: RunState | None) -> Condition:
        """Return what the run is doing."""
        return condition(state, live=self.runs, left=conditions.left(self.folder) if self.folder else None)


@contextlib.asynccontextmanager
async def attach(run: str, redis_url: str = "") -> AsyncIterator[Attached]:
    """Attach to a run: a folder, a name under `runs/` or, with `redis_url`, a name in that Redis. Empty: the newest run."""
    folder = paths.find(run) if redis_url else paths.existing(run)
    name = str(folder.keys("run.name")[0]) if folder else run
    if not name:
        raise ConsoleError("--redis-url needs a run name: pass it as RUN", EXIT_CONFIG)
    ttl_s = _ttl_s(folder if not redis_url else None)
    if folder and not redis_url and owns_server(folder):
        async with reading(folder, _say) as served:
            with usable(folder):
                login = Login((folder.redis / "password").read_text(encoding="utf-8").strip())
            async with _store(served.url, name, login) as store:
                runs = not served.holder.readers
                yield Attached(name, store, ttl_s, runs, runs, folder, served.holder)
        return
    url, login = _elsewhere(redis_url, name, folder)
    async with _store(url, name, login) as store:
        found = holder(folder.path) if folder else None
        runs = found is not None or bool(await store.fleet.members(ttl_s))
        yield Attached(name, store, ttl_s, True, runs, folder, found)


def _elsewhere(redis_url: str, name: str, folder: RunPaths | None) -> tuple[str, Login]:
    """Return the address of a Redis that is not the run's own, and the login."""
    if redis_url or folder is None:
        url, password = split_password(redis_url)
        return url, Login(password or os.environ.get(REDIS_PASSWORD_ENV, ""))
    address, *keys = folder.keys("redis.url", "redis.password_file", "redis.ca_file")
    return address, login_of(name, "console", *keys)


def _ttl_s(folder: RunPaths | None) -> float:
    """Return `fleet.ttl_s` of a run; of one whose folder is not on this machine its default."""
    if folder:
        return float(folder.keys("fleet.ttl_s")[0])
    from services.config.generation import Fleet

    return Fleet().ttl_s


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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


def later(attached: Attached) -> str:
    """Return the end of a message about a request, which a stopped run applies later."""
    return "" if attached.live else "; the run is stopped and applies this when it resumes"


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
