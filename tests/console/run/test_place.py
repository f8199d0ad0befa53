"""`grpo doctor` reports conflicts for which `grpo run` would refuse to start: the folder, the name, ports, Redis."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.config import RunConfig, digest
from services.console.commands.__main__ import main
from services.console.doctor import Finding, machine, resources
from services.console.lock import FolderLock
from services.console.run import place
from services.console.run.folder import RunFolder
from services.console.run.redis_server import RedisServer
from services.runtime.process_tools import CONFIG_ENV
from services.store import Store
from services.store.client import Login
from tests.newcomer.world import make_model
from tests.support.checkpoints import write_checkpoint
from tests.support.harness import small_config


def in_folder(config: RunConfig, *, trained: bool = True) -> RunFolder:
    """Create the folder of a run."""
    folder = RunFolder.of(config)
    folder.path.mkdir(parents=True)
    folder.write(config)
    if trained:
        folder.metrics.write_text("{}\n")
    return folder


def looked(config: RunConfig) -> list[tuple[str, str]]:
    return [(one.state, one.line) for one in place.folder(config, [])]


def test_the_folder_of_another_run_is_a_fault_and_of_an_untrained_one_a_note(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    assert looked(config) == []
    folder = in_folder(small_config(tmp_path, None, "sampling.temperature=0.7"), trained=False)
    [(state, detail)] = looked(config)
    assert (state, "has trained no step: grpo run replaces it" in detail) == ("note", True)
    folder.metrics.write_text("{}\n")
    [(state, detail)] = looked(config)
    assert (state, "sampling.temperature is 0.7 there and 1.0 here" in detail) == ("fault", True)
    folder.config.write_text("[run]\nsteps = true\n")
    [(state, detail)] = looked(config)
    assert (state, "a configuration that this version cannot read" in detail) == ("fault", True)


def test_the_folder_of_this_run_is_looked_at_for_its_steps_and_whether_it_runs(tmp_path: Path) -> None:
    config = small_config(tmp_path, None, "run.steps=20")
    folder = in_folder(config)
    assert [state for state, _ in looked(config)] == ["ok"]
    with FolderLock(folder.path):
        [(state, detail)] = looked(config)
    assert (state, "grpo run does not start it twice" in detail) == ("note", True)
    write_checkpoint(folder.checkpoints, 9)
    [(state, detail)] = looked(small_config(tmp_path, None, "run.steps=5"))
    assert (state, "run.steps = 5, but the run has trained 10: raise it" in detail) == ("fault", True)


async def test_another_run_of_this_name_in_the_redis_is_a_fault(tmp_path: Path, server: RedisServer, store: Store) -> None:
    config = small_config(tmp_path, server, f"run.name={store.keys.run.partition('{')[2].partition('}')[0]}")

    async def look() -> list[Finding]:
        return [one async for one in place.shared_name(config, server.url, Login(server.password))]

    assert await look() == []
    await store.run.create(digest(config), "data", 4, 8)
    assert await look() == []
    await store.client.hset(store.keys.run, "config", "0123")
    [found] = await look()
    assert (found.state, "with another configuration" in found.detail) == ("fault", True)


def test_a_port_for_the_endpoints_is_a_note_where_grpo_run_is_not_sure_to_start_the_services(tmp_path: Path) -> None:
    config = small_config(tmp_path, None, "api.port=8000")
    assert [one.state for one in resources.ports(config, own=True)] == ["fault"]
    [found] = resources.ports(config, own=False)
    assert (found.state, "so grpo run refuses it" in found.detail) == ("note", True)


def test_keys_without_effect_on_the_redis_that_is_used_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "ask_torch", lambda: {"torch": "2", "cuda": None, "gpus": []})
    make_model(tmp_path / "model")
    small_config(tmp_path)
    file, given = str(tmp_path / "run.toml"), ["redis.ca_file=/ca.pem", "redis.password_file=/users"]
    assert main(["doctor", file, *given]) == 1
    output = capsys.readouterr().out
    assert "redis.password_file = '/users' has no effect without redis.url" in output
    monkeypatch.setenv(CONFIG_ENV, file)
    main(["doctor", file, *given])
    assert "has no effect without redis.url" not in capsys.readouterr().out, "a pod's configuration is complete"
