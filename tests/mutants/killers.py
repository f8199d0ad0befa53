"""The tests that must fail if a guard is removed: those of the store that take milliseconds, run without pytest."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.console.run.redis_server import RedisServer
from services.store import Store
from tests.repeats.campaign import one_run
from tests.repeats.repeater import Journal
from tests.store.replay import draws, tables

MODULES = (
    "tests.store.test_guards", "tests.store.test_tickets", "tests.store.test_steps",
    "tests.store.test_control", "tests.store.test_fleet", "tests.store.test_evaluation",
    "tests.store.test_deadletters", "tests.store.test_discard_damaged",
    "tests.store.test_checkpoint_request", "tests.store.test_arguments", "tests.store.test_refusals",
    "tests.store.test_turns", "tests.store.test_samples", "tests.store.test_late_calls",
    "tests.store.replay.test_changed_weights", "tests.store.replay.test_headers", "tests.store.replay.test_removers",
    "tests.store.test_snapshot", "tests.store.test_conservation", "tests.store.replay.test_clocks",
)  # fmt: skip
FIXTURES = {"store", "tmp_path", "monkeypatch", "bench"}
SLOW = ("light_ones", "snapshot_under_load", "damaged_snapshot_files")
"""Parts of the names of tests that do not test functions or that take seconds."""
RANDOM = {"test_conservation": 3, "test_snapshot": 2}
"""Number of seeds of a random test; more would not be worth their time."""
LIMIT_S = 20.0


@dataclass(frozen=True)
class Killer:
    """A test with its parameters."""

    name: str
    test: Callable[..., Any]
    arguments: dict[str, Any]
    source: str = ""

    def near(self, place: str) -> bool:
        """Return whether the test calls the function that contains a guard."""
        return f"{place.removeprefix('eval_')}(" in self.source or f'"{place}"' in self.source


def killers() -> list[Killer]:
    """Return all tests, the most sensitive first."""
    found = [killer for module in MODULES for killer in _of(importlib.import_module(module))]
    return [*found, Killer("repeats", _repeats, {})]


async def _repeats(server: RedisServer) -> None:
    """Execute a whole run with every call repeated immediately."""
    journal = Journal(at_once=True)
    await one_run(server, f"repeats-{uuid.uuid4().hex[:8]}", journal)
    assert journal.harms == {}


def _of(module: Any) -> list[Killer]:
    found: list[Killer] = []
    for name, test in inspect.getmembers(module, inspect.iscoroutinefunction):
        if not name.startswith("test_") or test.__module__ != module.__name__ or any(part in name for part in SLOW):
            continue
        marks: list[Any] = getattr(test, "pytestmark", [])
        if any(mark.name == "slow" for mark in marks):
            continue
        choices = [_values(mark) for mark in marks if mark.name == "parametrize"]
        for number, chosen in enumerate(itertools.product(*choices)):
            arguments = {key: value for part in chosen for key, value in part.items()}
            needed = set(inspect.signature(test).parameters) - arguments.keys()
            most = RANDOM.get(module.__name__.rpartition(".")[2], 100) if "seed" in arguments else 100
            if needed <= FIXTURES and number < most:
                found.append(Killer(f"{name}[{number}]", test, arguments, inspect.getsource(test)))
    return found


def _values(mark: pytest.Mark) -> Sequence[dict[str, Any]]:
    names = [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else list(mark.args[0])
    rows = [row if len(names) > 1 else (row,) for row in mark.args[1]]
    return [dict(zip(names, row, strict=True)) for row in rows]


async def survives(server: RedisServer, order: Sequence[Killer]) -> Killer | None:
    """Run tests until one fails; return it, or None if the code survives them all."""
    for killer in order:
        try:
            async with asyncio.timeout(LIMIT_S):
                await _run(server, killer)
        except (Exception, pytest.fail.Exception):  # a test may fail in any way
            return killer
    return None


async def _run(server: RedisServer, killer: Killer) -> None:
    parameters = inspect.signature(killer.test).parameters
    given: dict[str, Any] = dict(killer.arguments)
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as folder:
        given |= {name: value for name, value in (("monkeypatch", monkeypatch), ("tmp_path", Path(folder))) if name in parameters}
        if "server" in parameters:
            await killer.test(server=server)
            return
        store = await Store.connect(server.url, f"m-{uuid.uuid4().hex[:8]}", server.password)
        given |= {name: store for name in ("store", "store") if name in parameters}
        try:
            if "bench" in parameters:
                name, code = draws.loaded_as()
                await store.client.execute_command("FUNCTION", "LOAD", "REPLACE", code)
                given["bench"] = draws.Bench(store, await tables.begin(store, "prioritized"), name)
            await killer.test(**given)
        finally:
            await store.client.flushall()
            await store.close()
