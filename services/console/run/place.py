"""What must hold before `grpo run` starts anything: its options and configuration, its folder, and its name in a shared Redis.

`grpo doctor` uses the same checks of folder and name, which only read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from services.config import ConfigError, RunConfig, digest
from services.config.load import load_with_places
from services.config.places import KeyPlaces
from services.config.secrets import split_password
from services.console.code import with_kept_code
from services.console.doctor import Finding, note, ok, told
from services.console.doctor.preflight import LOSS, Check, CheckAgain, faults_of
from services.console.errors import EXIT_CONFIG, ConsoleError
from services.console.gpus import forced_backend, memory_share
from services.console.lock import holder
from services.console.options import confirm
from services.console.printable import printable, say
from services.console.run.folder import RunFolder, check_redis, check_steps, resolve
from services.console.run.redis_server import start_server
from services.http.credentials import redis_password
from services.operations.inspection.checkpoints import restorable
from services.protocol.errors import StoreError
from services.runtime.checkpoints import CheckpointError, CheckpointFolder
from services.store import RunState, Store
from services.store.client import Login

FOLDER = "run folder"


@dataclass(frozen=True)
class Options:
    """The command-line options of `grpo run`."""

    file: Path
    overrides: Sequence[str] = ()
    redis_url: str = ""
    screen: bool = True
    fresh: bool = False
    resume: str = ""  # `latest`, or the step of a checkpoint
    web: bool = False  # serve the web console
    yes: bool = False  # do not ask
    as_json: bool = False  # print the summary as JSON at the end, and everything else on standard error


def redis_of(options: Options, config: RunConfig) -> tuple[str, str]:
    """Return the address of the run's Redis, empty for its own server, and its password."""
    return split_password(options.redis_url or config.redis.url)


def placed_error(error: StoreError, options: Options, url: str, places: KeyPlaces) -> StoreError:
    """Return an error about Redis with the key that says where it is, unless that is an option of the command."""
    if options.redis_url:
        return error
    said = str(error)
    return StoreError(places.told(said if said.startswith("redis.url = ") else f"redis.url = {url!r}: {said}"))


def checked(options: Options, check: Check, again: CheckAgain) -> tuple[RunConfig, KeyPlaces]:
    """Load the configuration and check everything that the run needs. Return it, and where its keys are set.

    A run that has begun resumes with the data and functions that it began with, which its services compare: `again` checks the
    rest. Prints notes. Raises `ConfigError` with all faults.
    """

    def begun(config: RunConfig) -> RunConfig | None:
        return None if options.fresh else RunFolder.of(config).held()

    def needed(config: RunConfig) -> list[Finding]:
        redis = check_redis(config, redis_of(options, config)[0])
        held = None if RunFolder.of(config).untrained else begun(config)
        return [*redis, *(check(config) if held is None else again(config, held))]

    loaded, found = faults_of(lambda before: load_with_places(options.file, options.overrides, before=before), needed, begun)
    faults = [one.line for one in found if one.state == "fault"]
    if faults or loaded is None:
        raise ConfigError(*faults)
    for one in found:
        if one.state == "note" and one.what != LOSS:  # which is described once the run is about to start
            print(f"note: {printable(one.line)}", flush=True)
    return loaded


def as_started(config: RunConfig, gpus: Sequence[str], web_port: int = 0) -> RunConfig:
    """Return the configuration with what this machine determines. Raise `ConsoleError` if the run does not fit on it."""
    values: dict[str, object] = {"web.port": web_port or config.web.port}
    if backend := forced_backend(config, gpus):
        values["sync.backend"] = backend
    if (share := memory_share(config, gpus)) is not None:
        values["generator.engine_options"] = config.generator.engine_options | {"gpu_memory_utilization": share}
    return resolve(config.with_values(values), RunFolder.of(config))


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
        check_steps(config, place.trained_steps())
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
        say(f"{path} has changed since the run began; the run continues with the copy in {folder.code}")
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
    server = start_server(folder.redis, folder.path.name) if not url and (folder.redis / "password").exists() else None
    try:
        if server is not None:
            url, password = server.url, server.password
        state = await state_of(config, url, password) if url else None
        return state.committed_step + 1 if state else 0
    finally:
        if server is not None:
            server.stop()


async def state_of(config: RunConfig, url: str, password: str) -> RunState | None:
    """Return the run's state in the Redis at `url`."""
    store = await Store.connect(url, config.run.name, administrator(config, password))
    try:
        return await store.run.state()
    finally:
        await store.close()


def administrator(config: RunConfig, password: str = "") -> Login:
    """Return the login that loads the functions and deletes old data, which none of the run's own users may do."""
    return Login(password or redis_password(config) or "", ca_file=config.redis.ca_file)
