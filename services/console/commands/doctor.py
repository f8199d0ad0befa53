"""The command `grpo doctor`: every check, and what it found as lines or JSON."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from services.config import RunConfig
from services.config.load import load_with_places
from services.config.secrets import split_password
from services.console.doctor import Finding, gathered, machine, release, server
from services.console.doctor.model import model
from services.console.doctor.packages import there
from services.console.doctor.preflight import faults_of, preflight, without_repeats
from services.console.doctor.rows import data
from services.console.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, ConsoleError
from services.console.gpus import visible_gpus
from services.console.options import Json, Overrides, RedisUrl
from services.console.printable import print_json, printable
from services.console.run import place
from services.console.run.folder import check_redis
from services.runtime.process_tools import CONFIG_ENV


async def doctor(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="TOML configuration file; default in a pod: the pod's own.")
    ] = None,
    overrides: Overrides = None,
    redis_url: RedisUrl = "",
    as_json: Json = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="In a pod of a release: check Redis, model, data and services, not the pod itself.")
    ] = False,
) -> int:
    """Check this machine, its Redis and a configuration.

    Each problem comes with a remedy. Exit code 1: a problem would stop the run.
    """
    if cluster and redis_url:
        raise ConsoleError("--cluster checks the release's own Redis: remove --redis-url", EXIT_CONFIG)
    given, overrides = _given(file), overrides or []

    def look(config: RunConfig) -> list[Finding]:
        return asyncio.run(examine_release(config) if cluster else examine(config, redis_url))

    loaded, found = await asyncio.to_thread(faults_of, lambda before: load_with_places(given, overrides, before=before), look)
    code = report(loaded[0].run.name if loaded else "", found, as_json)
    return code if loaded else EXIT_CONFIG


def _given(file: Path | None) -> Path:
    given = file or os.environ.get(CONFIG_ENV)
    if not given:
        raise ConsoleError(f"missing configuration file: give one, or set {CONFIG_ENV}", EXIT_CONFIG)
    return Path(given)


def report(run: str, found: Sequence[Finding], as_json: bool) -> int:
    """Print the findings and return the exit code."""
    faults = sum(one.state == "fault" for one in found)
    if as_json:
        print_json({"run": run, "faults": faults, "findings": [asdict(one) for one in found]})
    else:
        for one in found:
            print(f"{one.state:6}{printable(f'{one.what}: ' * (one.place != '') + one.line)}")
        print(f"{faults} problem{'' if faults == 1 else 's'} found" if faults else "All checks passed", flush=True)
    return EXIT_FAILED if faults else EXIT_OK


async def examine(config: RunConfig, redis_url: str = "") -> list[Finding]:
    """Return all findings: those of the server, of everything that `grpo run` checks, and what takes longer."""
    url, password = split_password(redis_url or config.redis.url)
    environ, gpus = os.environ, visible_gpus(os.environ)
    found = [finding async for finding in server.server(config, url, password)]
    if url and not any(one.state == "fault" for one in found):
        found += [finding async for finding in place.shared_name(config, url, server.login(config, password))]
    if CONFIG_ENV not in environ:  # a pod gets its configuration resolved
        found += [*check_redis(config, url), *place.folder(config, gpus)]
    looks = [
        ("shared memory", lambda: machine.shared_memory(config, len(gpus))),
        ("network", lambda: machine.network(config, environ)),
        ("GPUs", lambda: machine.gpus(environ) if there("torch") else ()),
    ]
    beside = asyncio.to_thread(gathered, looks)  # importing torch takes longest
    checked = asyncio.to_thread(preflight, config, gpus, environ, own=not url, remote=True)
    return found + [finding for each in await asyncio.gather(checked, beside) for finding in each]


async def examine_release(config: RunConfig) -> list[Finding]:
    """Return the findings on resources that the pods of a release share: Redis, model, data and each other."""
    found = [finding async for finding in server.server(config, config.redis.url, "")]
    found += without_repeats(gathered([("model", lambda: model(config)), ("data", lambda: data(config))]))
    return found + [finding async for finding in release.services(config)]
