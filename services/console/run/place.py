"""What stands under a run's name, in its folder and in a Redis that several runs share, and what becomes of it.

`grpo doctor` and `grpo run` use the same checks, which only read.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace

from services.config import ConfigError, RunConfig, digest
from services.console.code import with_kept_code
from services.console.doctor import Finding, note, ok, told
from services.console.errors import EXIT_CONFIG, ConsoleError
from services.console.gpus import forced_backend, memory_share
from services.console.lock import holder
from services.console.options import confirm
from services.console.run.folder import RunFolder, resolve
from services.console.run.load import Options
from services.console.run.redis_server import start_server
from services.console.run.resumption import administrator, check_steps, trained_by_files
from services.operations.inspection.checkpoints import restorable
from services.protocol.errors import StoreError
from services.runtime.checkpoints import CheckpointError, CheckpointFolder
from services.store import Store
from services.store.client import Login

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


def judged_as_before(config: RunConfig, folder: RunFolder) -> RunConfig:
    """Return the configuration with the code that the run in the folder began with, and report whether it has changed since."""
    if (held := folder.held()) is None:
        return config
    config, changed = with_kept_code(config, held)
    for path in changed:
        print(
            f"{path} has changed since the run began; the run continues with the copy in {folder.code}",
            file=sys.stderr,
            flush=True,
        )
    return config


def resumed_step(options: Options, folder: RunFolder, held: bool) -> int | None:
    """Return the step of the checkpoint that --resume requests; None: resume from the current state. Raise `ConsoleError`."""
    asked = options.resume
    if not asked:
        return None
    if options.fresh:
        raise ConsoleError(f"--resume {asked} and --fresh are mutually exclusive: remove one", EXIT_CONFIG)
    if asked != "latest" and not asked.isdecimal():
        raise ConsoleError(f"--resume {asked}: give `latest` or the step of a checkpoint (grpo checkpoints)", EXIT_CONFIG)
    if not held:
        raise ConsoleError(f"--resume {asked}: {folder.path} contains no run yet; remove --resume to start one", EXIT_CONFIG)
    if asked == "latest":
        return None
    try:
        return restorable(CheckpointFolder(folder.path / "checkpoints"), int(asked)).step
    except CheckpointError as error:
        raise ConsoleError(f"--resume {asked}: {error}", EXIT_CONFIG) from None


def fresh_or_asked(options: Options, config: RunConfig, folder: RunFolder, steps: Callable[[], int]) -> Options:
    """Return the options with `fresh` if the folder holds another run that has not trained a step, which is replaced.

    On a terminal, ask before `--fresh` deletes a run that has. `steps` asks its Redis, which may know more than its files.
    """
    if not folder.config.exists():
        return options
    if options.fresh:
        if not options.yes and not folder.untrained:
            confirm(f"Delete run {config.run.name} in {folder.path}, which has trained, and start over?")
        return options
    if not folder.untrained or folder.holds(config) or steps():
        return options
    print(f"the run in {folder.path} had another configuration and had trained no step: replacing it", flush=True)
    return replace(options, fresh=True)


async def trained(folder: RunFolder, config: RunConfig, url: str, password: str) -> int:
    """Return how many steps the run of this name has trained, by its Redis."""
    own = not url and (folder.redis / "password").exists()
    server = start_server(folder.redis, folder.path.name) if own else None
    try:
        if server is None and not url:
            return 0
        login = Login(server.password) if server else administrator(config, password)
        store = await Store.connect(server.url if server else url, config.run.name, login)
        try:
            state = await store.run.state()
        finally:
            await store.close()
    finally:
        if server is not None:
            server.stop()
    return state.committed_step + 1 if state else 0
