"""Checks what a run would find under its name: in its folder, and in a Redis that several runs share.

`grpo doctor` and `grpo run` use the same checks, which only read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence

from services.config import ConfigError, RunConfig, digest
from services.console.code import with_kept_code
from services.console.doctor import Finding, note, ok, told
from services.console.errors import EXIT_CONFIG, ConsoleError
from services.console.gpus import forced_backend, memory_share
from services.console.lock import holder
from services.console.run.folder import RunFolder, resolve
from services.console.run.resumption import check_steps, trained_by_files
from services.protocol.errors import StoreError
from services.store import Store
from services.store.connection.client import Login

FOLDER = "run folder"


def as_started(config: RunConfig, gpus: Sequence[str], web_port: int = 0) -> RunConfig:
    """Return the configuration with what this machine determines. Raise `ConsoleError` if the run does not fit on it."""
    backend, share = forced_backend(config, gpus), memory_share(config, gpus)
    return resolve(config, RunFolder.of(config), backend=backend, web_port=web_port, memory_share=share)


def folder(config: RunConfig, gpus: Sequence[str]) -> Iterator[Finding]:
    """Check that the run's folder is free, or holds this run with no more steps than it should have."""
    place = RunFolder.of(config)
    try:
        held = place.held()
        if held is None:
            return
        wanted = as_started(config, gpus)
        if place.untrained and not place.holds(wanted):
            yield note(FOLDER, f"{place.path} holds another configuration that has trained no step: grpo run replaces it")
            return
        place.check(with_kept_code(wanted, held)[0])
        check_steps(config, trained_by_files(place))
    except (ConsoleError, ConfigError) as error:
        yield told(FOLDER, error)
        return
    user = holder(place.path)
    if user is not None and not user.readers:
        yield note(FOLDER, f"the run in {place.path} runs now, and uses memory and ports: grpo run does not start it twice")
    else:
        yield ok(FOLDER, f"{place.path} holds this run, which grpo run resumes")


async def shared_name(config: RunConfig, url: str, login: Login) -> AsyncIterator[Finding]:
    """Check that the run's name in the Redis at `url` is free, or this run's."""
    try:
        held = RunFolder.of(config).held()
        await claim_name(config if held is None else with_kept_code(config, held)[0], url, login, fresh=False)
    except (ConsoleError, ConfigError, StoreError) as error:
        yield told("Redis: run.name", error)


async def claim_name(config: RunConfig, url: str, login: Login, fresh: bool) -> None:
    """Check that the run's name in a shared Redis is this run's or free; with --fresh, free it. Raise `ConsoleError`."""
    name = config.run.name
    store = await Store.connect(url, name, login)
    try:
        if fresh:
            alive = ", ".join(sorted(status.name for status in await store.fleet.members(config.fleet.ttl_s)))
            if alive:
                raise ConsoleError(
                    f"run {name!r} in Redis at {url} was not deleted: {alive} sent a heartbeat in the last "
                    f"{config.fleet.ttl_s:g} s; stop them first",
                    EXIT_CONFIG,
                )
            await store.restores.delete_run()
        await store.payloads.check()
        state = await store.run.state()
        if state is not None and state.config != digest(config):
            raise ConsoleError(
                f"Redis at {url} contains a run {name!r} with another configuration; choose another run.name, or delete it "
                "with --fresh",
                EXIT_CONFIG,
            )
    finally:
        await store.close()
