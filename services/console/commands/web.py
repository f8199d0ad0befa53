"""The command `grpo web`, which serves the web console of a run while the command runs.

Guarantees: the page stays at its address while the run stops, starts and ends: the page reads the run's Redis, whichever process
keeps it up. The page of a run that is over and whose Redis is gone shows what its folder has.
Waits for: Ctrl-C or SIGTERM, and for another process to take the run's folder, checked every `WATCH_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
from collections.abc import Coroutine, Mapping
from typing import Annotated, Any, TypeVar, cast

import typer

from services.config import RunConfig
from services.console.commands.attach import NOTE, Attached, attach, existing, folder_instead
from services.console.errors import EXIT_CONFIG, EXIT_OK, EXIT_REDIS, ConsoleError
from services.console.lock import holder
from services.console.options import Json, RedisUrl, Run
from services.console.paths import RunPaths
from services.console.printable import print_json
from services.http.credentials import ApiTokens, api_tokens
from services.runtime.process_tools import free_port
from services.store import Store

T = TypeVar("T")

WATCH_S = 0.5
AGAIN_S = 1.0  # between attempts to reach a run whose Redis is just stopping or starting


async def web(
    run: Run = "",
    redis_url: RedisUrl = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on; default: api.host.")] = "",
    as_json: Json = False,
) -> int:
    """Serve the web console of a run.

    The console shows what status and inspect show, live, with charts and controls. The command prints the address and serves the
    page until Ctrl-C. The controls need the run's token. With --json, the first line is an object with the address and the login
    links, and each later change of the run's state is another line.
    """
    port, told = port or free_port(""), _interrupted()
    served, folder = "", None
    while not told.is_set():
        try:
            async with contextlib.AsyncExitStack() as stack:
                attached = await _unless(told, stack.enter_async_context(attach(run, redis_url)))
                if attached is None:
                    break
                folder = attached.folder
                served = await _serve(attached, host, port, told, served, as_json)
        except ConsoleError as error:
            if not served:
                await _serve_folder(folder_instead(run, redis_url, error), host, port, told, as_json)
                return EXIT_OK
            over = folder is not None and holder(folder.path) is not None  # a run that is started over has no configuration yet
            if error.code != EXIT_REDIS and not over:
                raise
            await asyncio.sleep(AGAIN_S)
    return EXIT_OK


async def _unless(told: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what `work` returns. Cancel it and return None if the command is to end first."""
    working, waiting = asyncio.create_task(work), asyncio.create_task(told.wait())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        waiting.cancel()
        if working.cancel():
            await asyncio.wait((working,))


async def _serve(attached: Attached, host: str, port: int, told: asyncio.Event, served: str, as_json: bool) -> str:
    """Serve the page until Ctrl-C, or until another process holds the run's folder. Return the last reported condition."""
    from services.web.serving import show  # FastAPI, which no other command needs

    if attached.config is None or attached.folder is None:
        raise ConsoleError(f"run {attached.name}: grpo web needs its folder, which is not on this machine", EXIT_CONFIG)
    state = await attached.store.run.state() if served else await existing(attached)  # one that is started over has none yet
    word = attached.condition(state).word
    config, until = _here(attached.config, attached.folder, host, port), asyncio.Event()

    def say(url: str) -> None:
        if served != word:
            _print(attached.name, word, {} if served else _links(url, api_tokens(config)), as_json)

    watching = asyncio.create_task(_watch(attached, told, until))
    try:
        await show(config, attached.store, say, until, attached.condition, told.is_set)
    finally:
        watching.cancel()
    return word


async def _serve_folder(folder: RunPaths, host: str, port: int, told: asyncio.Event, as_json: bool) -> None:
    """Serve the page of a run without its Redis until Ctrl-C."""
    from services.web.from_folder import GoneStore
    from services.web.serving import show

    config, tokens = _here(folder.settings, folder, host, port), _tokens(folder)

    def say(url: str) -> None:
        links = {**_links(url, tokens), "control": ""}  # there is nothing left to control
        _print(folder.path.name, folder.condition_now().word, links, as_json, NOTE)

    gone = cast("Store", GoneStore())
    await show(config, gone, say, told, lambda _: folder.condition_now(), folder=folder.path, tokens=tokens)


async def _watch(attached: Attached, told: asyncio.Event, until: asyncio.Event) -> None:
    """Set `until` when the command is to end, or when the run's folder has another holder than when it was attached."""
    while not told.is_set():
        if attached.folder is not None and holder(attached.folder.path) != attached.holder:
            break
        await asyncio.sleep(WATCH_S)
    until.set()


def _links(url: str, tokens: ApiTokens) -> dict[str, str]:
    """Return the page's address, and addresses that log a browser in: a browser sends the fragment of an address to no server."""
    look = f"{url}/#token={tokens.read}" if tokens.read else url
    return {"url": url, "control": f"{url}/#token={tokens.operate}", "view": look}


def _print(run: str, word: str, links: Mapping[str, str], as_json: bool, note: str = "") -> None:
    """Print the run's condition, and how to reach the page unless that has been printed."""
    if as_json:
        print_json({"run": run, "condition": word, **links, **({"note": note} if note else {})}, line=True)
        return
    control = [f"to control it: {links['control']}"] if links.get("control") else []
    look = [*control, f"to view only:  {links['view']}", "(Ctrl-C to quit)"] if links else []
    print(f"run {run}: {word}{f'; {note}' if note else ''}", *look, sep="\n  ", flush=True)


def _tokens(folder: RunPaths) -> ApiTokens:
    """Return the folder's own tokens, or one for this page only if they cannot be read, by which reading needs none."""
    try:
        return ApiTokens(folder.token.read_text().strip(), folder.read_token.read_text().strip())
    except OSError:
        return ApiTokens(secrets.token_urlsafe())


def _here(config: RunConfig, folder: RunPaths, host: str, port: int) -> RunConfig:
    """Return the configuration with the page's address and the folder's current location."""
    values = {"api.host": host or config.api.host, "web.port": port, "run.dir": str(folder.path.parent)}
    return config.with_values(values)


def _interrupted() -> asyncio.Event:
    """Return an event that Ctrl-C or SIGTERM sets."""
    told = asyncio.Event()
    for sig in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sig, told.set)
    return told
