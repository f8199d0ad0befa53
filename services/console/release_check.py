"""Check values before a release changes anything: `python -m services.console.release_check CONFIG --before CONFIG`.

The chart runs it before an install or upgrade (charts/templates/check.yaml). It refuses a configuration that is invalid, and one
that the run of this name in Redis cannot continue with.

Guarantees: it only reads; the last line says what is wrong and what to do. A Redis that cannot be reached refuses nothing: an
upgrade may be what repairs it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from services.config import ConfigError, RunConfig, digest, load, load_resolved
from services.config.differences import differing
from services.config.load import NOT_DEFINING
from services.console.errors import EXIT_CONFIG, EXIT_OK
from services.http.credentials import redis_login
from services.protocol.errors import StoreError
from services.store import RunState, Store

SHOWN = 4  # differing keys that a message names
AGAIN = "nothing was changed. Fix it, then run the same command again, as `helm upgrade --install` if it was an install"


def refusal(state: RunState | None, config: RunConfig, before: RunConfig | None) -> str:
    """Return why the run in Redis cannot continue with `config`, or "". `before`: the last release's configuration."""
    if state is None or state.config == digest(config):
        return ""
    what = "a key that defines it has changed"
    if before is not None and before.run.name == config.run.name:
        found = differing(*(each.model_dump(mode="json", exclude=NOT_DEFINING) for each in (before, config)))
        told = "; ".join(f"config.{key} was {then!r} and is {now!r}" for key, (then, now) in list(found.items())[:SHOWN])
        more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        what = f"{told}{more}" if found else "the content of a file that a verifier or an environment names has changed"
    return (
        f"run {config.run.name!r} exists and cannot continue with these values: {what}. Set config.run.name to a new name to "
        "start another run, or undo the change"
    )


async def existing(config: RunConfig) -> RunState | None:
    """Return the state of the run in Redis, None if there is none. Raises `StoreError`, `ConfigError` without a password."""
    store = await Store.connect(config.redis.url, config.run.name, redis_login(config, "console"))
    try:
        return await store.run.state()
    finally:
        await store.close()


def _before(path: Path | None) -> RunConfig | None:
    try:
        return load_resolved(path) if path and path.is_file() else None
    except ConfigError:
        return None  # of a version with other keys


def main(argv: list[str] | None = None) -> int:
    """Check and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m services.console.release_check", description="Check a release's values.")
    parser.add_argument("config", type=Path, help="the new configuration")
    parser.add_argument("--before", type=Path, help="the configuration of the release so far, if there is one")
    parser.add_argument("--offline", action="store_true", help="do not look for the run in Redis")
    options = parser.parse_args(argv)
    try:
        config = load(options.config)
        digest(config)
    except ConfigError as error:
        return _refuse(str(error))
    if not options.offline:
        try:
            state = asyncio.run(existing(config))
        except (StoreError, ConfigError) as error:
            print(f"the values are valid, but were not compared with the run: {error}")
            return EXIT_OK
        if why := refusal(state, config, _before(options.before)):
            return _refuse(why)
    print(f"the values are valid for run {config.run.name}")
    return EXIT_OK


def _refuse(why: str) -> int:
    print(f"error: {' '.join(why.split())}; {AGAIN}", file=sys.stderr, flush=True)
    return EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main())
