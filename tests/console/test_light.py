"""The command line stays fast: slow modules are imported only by commands that need them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperArgument, TyperOption

from services.config import digest
from services.console.__main__ import app, with_waits
from services.console.arguments import USAGE_ERROR, _process_value, only, quicken
from services.console.run.folder import RunFolder, resolve
from services.console.run.redis_server import RedisServer
from services.operations.cost import Account, ProcessTime, write_account
from services.protocol.messages import PodStatus
from services.store import Store
from tests.newcomer.world import make_model
from tests.operations.samples.made import made_row, write_log
from tests.support.console import ROOT
from tests.support.harness import small_config

HEAVY = (
    "torch", "transformers", "fastapi", "httpx", "numpy", "pyarrow", "pydantic", "rich", "kubernetes",
    "aiohttp",
)  # fmt: skip
"""Modules that take at least 50 ms of CPU time to import."""
VERBS: dict[str, set[str]] = {
    "--help": set(),
    "version": set(),
    "ls .": set(),
    "logs small": set(),
    "compare small small": set(),
    "cost small": {"pyarrow"},
    "samples small": set(),
    "samples small --where reward<0.4": set(),
    "status small --json": set(),
    "audit small --json": set(),
    "inspect ledger small --json": set(),
    "acl small --users users": set(),
    "pause small": set(),
    "resume small": set(),
    "scale 2 small": set(),
    "status small": set(),
    "audit small": set(),
    "inspect ledger small": set(),
    "checkpoint small": set(),
    "checkpoints small": set(),
    "inspect buffer small": set(),
    "inspect deadletter small": set(),
    "inspect sync small": set(),
    "config run.toml": {"pydantic"},
    "stop small --json": set(),
}
"""Commands, all run in one process, and the slow modules that each needs beyond those that precede it."""
CODE = """
import json, sys
from services.console.__main__ import main
known = set()
found = {}
for words in json.loads(sys.argv[1]):
    code = main(words.split())
    modules = set(sys.modules)
    found[words] = code, sorted(modules - known)
    known |= modules
print()
print(json.dumps(found))
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """Yield the working folder of a run with a live Redis, one pod and one step, as its services would leave it."""
    server = RedisServer(tmp_path / "redis")
    server.start()
    make_model(tmp_path / "model")
    config = small_config(tmp_path, server)
    folder = RunFolder.of(config)
    config = resolve(config, folder, server.url, str(tmp_path / "password"))
    folder.write(config)
    folder.metrics.write_text('{"step": 0, "reward/train/mean": 0.5}\n')
    write_account(folder.path, Account({"trainer-0:b": ProcessTime("trainer-0", "trainer", 1, 60.0, {"training": 60.0})}))
    write_log(folder.path / "samples", [made_row(number) for number in range(4)])
    (folder.logs / "trainer-0.log").write_text("a line\n")
    (tmp_path / "runs").symlink_to(".")

    async def begin() -> None:
        store = await Store.connect(server.url, config.run.name, server.password)
        await store.run.create(digest(config), "data", config.run.steps, config.slots)
        await store.fleet.beat(PodStatus("trainer", "trainer-0", "b", "here", os.getpid(), "", "training", 0, 0, {}), 60.0)
        await store.monitor.record({"step": 0.0, "reward/train/mean": 0.5})
        await store.close()

    asyncio.run(begin())
    yield tmp_path
    server.stop()


ARGUMENTS = (
    "ls", "logs small trainer", "logs small -n 3", "logs small --lines -1", "logs small --lines x", "scale",
    "status --json small",
    "samples small --limit 0", "inspect buffer small --sort height", "inspect buffer small --reverse", "run", "run --fast", "rum",
    "checkpoint small --wait 5", "compare small", "web --port 70000", "--version", "inspect", "fork small --at -1", "ls nowhere",
)  # fmt: skip


@pytest.mark.parametrize("words", ARGUMENTS)
def test_arguments_are_parsed_as_by_typer(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed() -> object:
        command: Any = typer.main.get_command(only(app, words.split()))
        try:
            context = command.make_context("grpo", with_waits(words.split()))
            name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
            inner = command.make_context(name, list(rest), parent=context)
        except (USAGE_ERROR, typer.Exit) as error:
            return type(error), str(error)
        return name, inner.params, inner.args

    quicken()
    quick = parsed()
    for kind in (TyperOption, TyperArgument):
        assert kind.process_value is _process_value  # otherwise this version of typer does not need it
        monkeypatch.setattr(kind, "process_value", kind.checked_value)
    assert quick == parsed()


def test_commands_import_only_what_they_need(run: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(list(VERBS))], cwd=run, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert {words: code for words, (code, _) in found.items() if code} == {}, done.stderr
    heavy = {words: set(modules) & set(HEAVY) for words, (_, modules) in found.items()}
    assert {words: names for words, names in heavy.items() if names - VERBS[words]} == {}
