"""The options of `grpo run`: loads the configuration, and checks everything before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.config import ConfigError, RunConfig
from services.config.load import load_with_places
from services.config.places import KeyPlaces
from services.config.secrets import split_password
from services.console.doctor import Finding
from services.console.doctor.preflight import LOSS, Check, CheckAgain, faults_of
from services.console.printable import printable
from services.console.run.folder import RunFolder, check_redis
from services.protocol.errors import StoreError


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
