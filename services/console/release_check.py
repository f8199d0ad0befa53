"""Check values before a release changes anything: `python -m services.console.release_check CONFIG`.

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

from services.config import ConfigError, RunConfig, defining, digest, load
from services.console.errors import EXIT_CONFIG, EXIT_OK
from services.dataprep.identity import differences
from services.http.credentials import redis_login
from services.protocol.errors import DifferentRun, StoreError
from services.store import Store

AGAIN = "nothing was changed. Fix it, then run the same command again, as `helm upgrade --install` if it was an install"


async def refusal(config: RunConfig) -> str:
    """Return why the run in Redis cannot continue with `config`, or "".

    Raise `StoreError` if Redis cannot be read, `ConfigError` without a password.
    """
    store = await Store.connect(config.redis.url, config.run.name, redis_login(config, "console"))
    try:
        state = await store.run.state()
        if state is None:
            return ""
        if state.config != digest(config):
            changed = differences(await store.run.defining(), defining(config))
            return (
                f"run {config.run.name!r} exists and cannot continue with these values of config: {changed}. "
                "Set config.run.name to a new name to start another run, or undo the change"
            )
        if config.run.steps <= state.committed_step:
            trained = state.committed_step + 1
            return f"config.run.steps = {config.run.steps}, but run {config.run.name!r} has trained {trained}: raise it"
        return ""
    except DifferentRun as error:  # of another version
        return f"{error}; or set config.run.name to a new name to start another run"
    finally:
        await store.close()


def main(argv: list[str] | None = None) -> int:
    """Check and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m services.console.release_check", description="Check a release's values.")
    parser.add_argument("config", type=Path, help="the new configuration")
    parser.add_argument("--offline", action="store_true", help="do not look for the run in Redis")
    options = parser.parse_args(argv)
    try:
        config = load(options.config)
        digest(config)
    except ConfigError as error:
        return _refuse(str(error))
    if not options.offline:
        try:
            why = asyncio.run(refusal(config))
        except (StoreError, ConfigError) as error:
            print(f"the values are valid, but were not compared with the run: {error}")
            return EXIT_OK
        if why:
            return _refuse(why)
    print(f"the values are valid for run {config.run.name}")
    return EXIT_OK


def _refuse(why: str) -> int:
    print(f"error: {' '.join(why.split())}; {AGAIN}", file=sys.stderr, flush=True)
    return EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main())
