"""Implements `grpo web`, which serves the web console of a run while the command runs."""

from __future__ import annotations

import asyncio
import signal

from services.config import RunConfig
from services.console.attach import attach, existing
from services.console.errors import EXIT_CONFIG, EXIT_OK, ConsoleError
from services.console.local.folder import RunFolder


async def web(run: str, redis_url: str, host: str, port: int) -> int:
    """Serve the page until Ctrl-C."""
    from services.web.serving import show

    async with attach(run, redis_url) as attached:
        if attached.config is None or attached.folder is None:
            raise ConsoleError(f"run {attached.name}: grpo web needs its folder, which is not on this machine", EXIT_CONFIG)
        await existing(attached)
        config = _here(attached.config, attached.folder, host, port)
        if not attached.live:
            print(f"run {attached.name} is not running; its Redis is started while this command runs", flush=True)

        def say(url: str) -> None:
            print(f"run {attached.name}: {url} (Ctrl-C to quit)", flush=True)
            print(f"to control the run there, enter the token in {config.api.token_file}", flush=True)

        await show(config, attached.store, say, _interrupted())
    return EXIT_OK


def _here(config: RunConfig, folder: RunFolder, host: str, port: int) -> RunConfig:
    """Return the configuration with the page's address and the folder's present location."""
    return config.model_copy(
        update={
            "web": config.web.model_copy(update={"host": host or config.web.host, "port": port}),
            "run": config.run.model_copy(update={"dir": str(folder.path.parent)}),
        }
    )


def _interrupted() -> asyncio.Event:
    """Return an event that Ctrl-C or SIGTERM sets."""
    told = asyncio.Event()
    for sig in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sig, told.set)
    return told
