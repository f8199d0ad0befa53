"""Serve the console of a run in Redis inside a test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from services.config import RunConfig
from services.store import Store
from services.web.serving import show
from services.web.watch import Describe, running
from tests.support.harness import wait_until


@contextlib.asynccontextmanager
async def served(config: RunConfig, store: Store, describe: Describe = running) -> AsyncIterator[str]:
    """Serve the console and yield its address. `describe` returns what the run is doing."""
    lines, until = list[str](), asyncio.Event()
    serving = asyncio.create_task(show(config, store, lines.append, until, describe))
    try:
        await wait_until(lambda: lines or serving.done())
        yield lines[0]
    finally:
        until.set()
        await serving
