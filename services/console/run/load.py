"""The options of `grpo run`, and everything that is checked before it starts anything."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from services.config import ConfigError, RunConfig
from services.config.load import load_with_places
from services.config.places import KeyPlaces
from services.console.code import with_kept_code
from services.console.doctor import Finding
from services.console.doctor.preflight import LOSS, Check, CheckAgain, faults_of
from services.console.errors import EXIT_CONFIG, ConsoleError
from services.console.options import confirm
from services.console.printable import printable
from services.console.run.folder import RunFolder, check_redis
from services.operations.inspection.checkpoints import restorable
from services.protocol.errors import StoreError
from services.runtime.checkpoints import CheckpointError, CheckpointFolder
from services.store.connection.client import split_password


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


def fresh_or_asked(options: Options, config: RunConfig, folder: RunFolder, trained: Callable[[], int]) -> Options:
    """Return the options with `fresh` if the folder holds another run that has not trained a step, which is replaced.

    On a terminal, ask before `--fresh` deletes a run that has. `trained` asks its Redis, which may know more than its files.
    """
    if not folder.config.exists():
        return options
    if options.fresh:
        if not options.yes and not folder.untrained:
            confirm(f"Delete run {config.run.name} in {folder.path}, which has trained, and start over?")
        return options
    if not folder.untrained or folder.holds(config) or trained():
        return options
    print(f"the run in {folder.path} had another configuration and had trained no step: replacing it", flush=True)
    return replace(options, fresh=True)
