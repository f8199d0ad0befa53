"""Serves the web console of a run: as a separate pod (`python -m services.web`), or while `grpo web` runs.

Guarantees: viewing the console changes nothing in the run; all changes go through the same guarded endpoints that other services
have.
Waits for: the signal to end. Unblocked by: SIGTERM or Ctrl-C, within `END_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path

from services.config import RunConfig
from services.http.api import serve
from services.http.credentials import ApiTokens, api_tokens
from services.http.endpoints import add_checkpoint_routes, add_run_routes
from services.runtime.loops import end_tasks
from services.runtime.service import Service, new_status
from services.store import Store
from services.web.from_folder import FolderWatch, folder_router
from services.web.pages import add_page
from services.web.watch import Describe, Watch, running

END_S = 5.0  # for the last poll and the last frame


def at_its_port(config: RunConfig) -> RunConfig:
    """Return the configuration of a pod that serves its endpoints at the page's port."""
    return config.with_values({"api.port": config.web.port})


def add_console(service: Service, describe: Describe = running, folder: Path | None = None) -> Watch:
    """Add the page and its endpoints to a service's app. `describe` returns what the run is doing. `folder`: the run's, if it is
    all that is left of the run.
    """
    config = service.config
    if folder is None:
        watch = Watch(service.store, config.fleet.ttl_s, config.generator.count, describe, config.fleet.scaling)
    else:
        watch = FolderWatch(config, folder, describe)
        service.app.include_router(folder_router(service, folder))
    add_run_routes(service)
    add_checkpoint_routes(service)
    add_page(service, watch)
    return watch


async def show(
    config: RunConfig,
    store: Store,
    say: Callable[[str], None],
    until: asyncio.Event,
    describe: Describe = running,
    last: Callable[[], bool] = lambda: True,
    folder: Path | None = None,
    tokens: ApiTokens | None = None,
) -> None:
    """Serve the console of a run until `until` is set, without joining its fleet.

    `say` receives the address. `describe` returns what the run is doing. `last`: whether pages are sent a last frame, by which
    they know that the console was stopped; otherwise they connect again. `folder`: as of `add_console`. `tokens`: those that
    requests need; default: those of the configuration.
    """
    config = at_its_port(config)
    service = Service("web", config, store, new_status("web", "web", "ready"))
    async with (
        serve(service, tokens or api_tokens(config)) as url,
        _watching(service, add_console(service, describe, folder), until, last),
    ):
        say(url)
        await until.wait()


@contextlib.asynccontextmanager
async def _watching(service: Service, watch: Watch, until: asyncio.Event, last: Callable[[], bool]) -> AsyncGenerator[None]:
    task = asyncio.create_task(service.add_loop("watch", partial(watch.follow, until)).supervise())
    try:
        yield
        if last():
            await asyncio.wait([task], timeout=END_S)
    finally:
        await end_tasks([task])
        await watch.feed.close()
