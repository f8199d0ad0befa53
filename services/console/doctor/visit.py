"""Runs all checks of `grpo doctor`, prints them as a table or JSON, and returns the exit code."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from services.config import RunConfig, load
from services.console.doctor import Finding, gathered, inputs, machine, release, server, work
from services.console.doctor import reach as collective
from services.console.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, ConsoleError
from services.console.local.folder import split_password
from services.console.local.plan import visible_gpus
from services.console.printable import cell, safe_json
from services.runtime.entry import CONFIG_ENV


async def doctor(file: Path | None, overrides: Sequence[str], redis_url: str, as_json: bool, cluster: bool = False) -> int:
    """Check everything a run of this configuration needs here. Return exit code 1 when something would stop it."""
    if cluster and redis_url:
        raise ConsoleError("--cluster checks the release's own Redis: remove --redis-url", EXIT_CONFIG)
    config = load(_given(file), overrides)
    found = await (examine_release(config) if cluster else examine(config, redis_url))
    return report(config, found, as_json, "All checks passed")


def network(file: Path | None, overrides: Sequence[str], reach: str, as_json: bool) -> int:
    """Run a collective between this machine and another, where the same command runs with the other option."""
    config = load(_given(file), overrides)
    return report(
        config, list(collective.check(config, reach)), as_json, "All checks passed: these two machines can sync weights"
    )


def _given(file: Path | None) -> Path:
    given = file or os.environ.get(CONFIG_ENV)
    if not given:
        raise ConsoleError(f"missing configuration file: give one, or set {CONFIG_ENV}", EXIT_CONFIG)
    return Path(given)


def report(config: RunConfig, found: Sequence[Finding], as_json: bool, well: str) -> int:
    """Print the findings and return the exit code."""
    faults = sum(one.state == "fault" for one in found)
    if as_json:
        findings = {"run": config.run.name, "faults": faults, "findings": [asdict(one) for one in found]}
        print(safe_json(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode()))
    else:
        _show(found)
        print(f"{faults} problem{'' if faults == 1 else 's'} found" if faults else well, flush=True)
    return EXIT_FAILED if faults else EXIT_OK


async def examine(config: RunConfig, redis_url: str = "") -> list[Finding]:
    """Return all findings, in the order of the table."""
    url, password = split_password(redis_url or config.redis.url)
    found = [finding async for finding in server.server(config, url, password)]
    environ = os.environ
    looks = [
        ("disk", lambda: machine.disk(config)),
        ("shared memory", lambda: machine.shared_memory(config, len(visible_gpus(environ)))),
        ("GPUs", lambda: machine.gpus(config, environ)),
        ("network", lambda: machine.network(config, environ)),
        ("model", lambda: work.model(config)),
        ("data", lambda: inputs.data(config)),
        ("functions", lambda: inputs.functions(config)),
        ("verifiers", lambda: inputs.verifiers(config)),
        ("secrets", lambda: work.secrets(config, environ, own=not url)),
    ]
    return found + await asyncio.to_thread(gathered, looks)


async def examine_release(config: RunConfig) -> list[Finding]:
    """Return the findings on what the pods of a release share: Redis, model, data and each other."""
    found = [finding async for finding in server.server(config, config.redis.url, "")]
    found += gathered([("model", lambda: work.model(config)), ("data", lambda: inputs.data(config))])
    return found + [finding async for finding in release.services(config)]


def _show(found: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("", "check", "result", "remedy"):
        table.add_column(name)
    styles = {"ok": "green", "note": "yellow", "fault": "bold red"}
    for one in found:
        table.add_row(f"[{styles[one.state]}]{one.state}[/]", one.what, cell(one.detail), cell(one.remedy))
    Console().print(table)
