"""The command line: help, configuration, one-line errors, and commands on a run."""

from __future__ import annotations

import getpass
import json
import os
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from services.config import digest, load_resolved, to_toml
from services.console.commands.__main__ import app, main, with_waits
from services.console.run.folder import RunFolder
from services.console.run.redis_server import RedisServer, start_server
from services.protocol.messages import PodStatus
from services.store import Store
from tests.newcomer.world import make_model
from tests.support.harness import small_config
from tests.support.preloading.starter import PLAIN


def grpo(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_help_without_arguments_names_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = grpo(capsys)
    assert code == 0
    assert "130 stopped early" in " ".join(output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config", "nowhere.toml"], "configuration file nowhere.toml does not exist"),
        (["run", "nowhere.toml"], "configuration file nowhere.toml does not exist"),
        (["config", "{file}", "run.stepz=3"], "run.stepz = 3 is not a known key; did you mean 'steps'?"),
        (["run", "{file}", "sampling.group_size=1"], "sampling.group_size = 1"),
        (["run"], "Missing argument 'FILE'"),
        (["rum"], "No such command 'rum'"),
        (["run", "--fast"], "No such option: --fast"),
        (["run", "{file}", "--run.steps", "5"], "--run.steps; write run.steps=VALUE, without dashes, to override a key"),
        (["inspect", "buffer", "--sort", "age"], "'--sort': 'age' is not one of"),
        (["config"], "missing configuration file: give one, or --explain"),
        (["status", "nobody"], "no run 'nobody' found"),
        (["status", "--redis-url", "redis://127.0.0.1:1/0"], "--redis-url needs a run name"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    small_config(tmp_path)
    make_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    code, _, errors = grpo(capsys, *(argument.replace("{file}", "run.toml") for argument in arguments))
    assert code == 2
    assert errors.startswith("error: ")
    assert message in errors
    assert errors.count("\n") == 1


def test_an_unreachable_redis_is_exit_code_3(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small_config(tmp_path)
    make_model(tmp_path / "model")
    code, _, errors = grpo(capsys, "run", tmp_path / "run.toml", "--redis-url", "redis://:secret@127.0.0.1:1/0")
    assert code == 3
    assert errors.startswith("error: Redis at redis://127.0.0.1:1/0 cannot be reached")
    assert "secret" not in errors
    assert errors.count("\n") == 1
    assert grpo(capsys, "run", tmp_path / "run.toml", "--redis-url", "http://host")[0] == 2


def test_an_old_run_with_an_obsolete_key_can_be_resumed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = small_config(tmp_path)
    folder = RunFolder.of(config)
    folder.write(config.model_copy(update={"reference": config.reference.model_copy(update={"alpha": 0.5})}))
    folder.metrics.write_text('{"step": 0}\n')
    assert grpo(capsys, "checkpoints", folder.path)[0] == 0
    again = ("run", tmp_path / "run.toml", "--resume", "99", "reference.alpha=0.5")
    assert "error: --resume 99: " in grpo(capsys, *again)[2]
    assert "reference.alpha = 0.5 has no effect" in grpo(capsys, *again, "--fresh")[2]
    assert "reference.alpha = 0.7 has no effect" in grpo(capsys, *again, "reference.alpha=0.7")[2]


def test_the_whole_configuration_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = small_config(tmp_path, None, "run.steps=9")
    code, text, _ = grpo(capsys, "config", tmp_path / "run.toml", "run.steps=9")
    assert (code, tomllib.loads(text)) == (0, tomllib.loads(to_toml(config)))
    code, text, _ = grpo(capsys, "config", tmp_path / "run.toml", "run.steps=9", "--json")
    assert json.loads(text) == config.model_dump(mode="json")


def test_every_key_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = grpo(capsys, "config", "--explain")
    assert code == 0
    assert "sampling.temperature: float = 1.0\n    Softmax temperature. The trainer divides" in text
    assert 'replay.sampler: "fifo" | "lifo" | "freshest" | "uniform" | "prioritized" = "fifo"' in text
    assert "model.path: str  (required)" in text
    keys = json.loads(grpo(capsys, "config", "--explain", "--json")[1])
    assert all(key["help"] and key["type"] for key in keys)
    assert {"verifiers[].kind", "data.sources[](reasoning_gym).task", "run.name"} <= {key["key"] for key in keys}


def test_installed_versions_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(grpo(capsys, "version", "--json")[1])
    assert found.keys() >= {"grpo", "python", "torch", "redis"}
    assert f"grpo          {found['grpo']}" in grpo(capsys, "version")[1]


def test_every_command_has_json_output(capsys: pytest.CaptureFixture[str]) -> None:
    """The help texts say so."""
    verbs = [name for name in get_command(app).commands if name not in ("inspect", "replay")]
    assert len(verbs) > 20
    assert [name for name in verbs if "--json" not in grpo(capsys, name, "--help")[1]] == []


@pytest.mark.parametrize(
    ("words", "wait"),
    [
        ("pause small --wait", "300"),
        ("pause smoke --wait --json", "300"),
        ("smoke --wait", "600"),
        ("smoke small --wait 20", "20"),
        ("pause --wait 0.5 small", "0.5"),
    ],
)
def test_wait_without_a_number_uses_the_commands_default(words: str, wait: str) -> None:
    given = with_waits(words.split())
    assert given[given.index("--wait") + 1] == wait
    assert given.count("--wait") == 1


@pytest.mark.parametrize("command", ["pause", "resume", "scale", "drain", "checkpoint", "restore", "stop", "smoke"])
def test_help_states_one_default_wait(capsys: pytest.CaptureFixture[str], command: str) -> None:
    text = " ".join(grpo(capsys, command, "--help")[1].partition("[SECONDS]")[2].split()).partition(" --")[0]
    assert ("default: 600." if command == "smoke" else "without a number: 300.") in text
    assert "[default: " not in text


LONG_NAME = "z-release-with-a-name-of-forty-characters-dataprep-7f9c5d8b6d-x2x4z"


def stopped_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool = False) -> RunFolder:
    """Return the folder of a run whose own Redis server is down."""
    import asyncio

    monkeypatch.setenv(PLAIN, "1")
    folder = RunFolder.of(small_config(tmp_path, None, "fleet.ttl_s=600"))
    folder.write(small_config(tmp_path, None, "fleet.ttl_s=600"))
    server = start_server(folder.redis, folder.path.name)
    asyncio.run(begin(folder, server))
    if finished:
        asyncio.run(finish(folder, server))
    server.stop()
    return folder


def test_commands_do_not_wait_for_a_stopped_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, began = stopped_run(tmp_path, monkeypatch), time.monotonic()
    for words in (["scale", "2", folder.path], ["checkpoint", folder.path], ["pause", folder.path]):
        code, text, _ = grpo(capsys, *words, "--wait")
        assert text.endswith("the run is stopped and applies this when it resumes\n"), "nothing timed out"
        assert code == 1, "it has not complied"
    refusal = "error: run small is stopped: "
    assert grpo(capsys, "smoke", folder.path)[2].endswith(f"{refusal}start it with grpo run\n")
    assert grpo(capsys, "drain", "generator-0", folder.path)[2].endswith(f"{refusal}it has no generators\n")
    assert time.monotonic() - began < 200, "the default wait is 300 s"


def test_a_finished_run_is_neither_paused_nor_resumed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, finished = stopped_run(tmp_path, monkeypatch, finished=True), "it has already finished: trained 4 of 4 steps"
    for command in ("pause", "resume"):
        code, text, errors = grpo(capsys, command, folder.path)
        assert (code, text) == (2, "")
        assert f"error: run small: {finished}; to continue it, raise run.steps and start it again\n" in errors
    assert f"error: run small: {finished}\n" in grpo(capsys, "stop", folder.path, "--yes")[2]
    assert "has already finished" in grpo(capsys, "scale", "2", folder.path)[2]
    assert "without a checkpoint of step 0: its trainer has exited" in grpo(capsys, "checkpoint", folder.path)[2]
    assert "error: run small is finished: it has no generators\n" in grpo(capsys, "drain", "generator-0", folder.path)[2]


async def finish(folder: RunFolder, server: RedisServer) -> None:
    """End a run as its trainer would."""
    store = await Store.connect(server.url, load_resolved(folder.config).run.name, server.password)
    await store.run.finish("trained 4 of 4 steps")
    await store.close()


async def begin(folder: RunFolder, server: RedisServer) -> None:
    """Create a run with one pod and one step, as its services would."""
    config = load_resolved(folder.config)
    store = await Store.connect(server.url, config.run.name, server.password)
    await store.run.create(digest(config), "data", config.run.steps, config.slots)
    await store.fleet.beat(PodStatus("web", LONG_NAME, "b", "here", os.getpid(), "", "ready", 0, 0, {}), 600.0)
    await store.fleet.beat(PodStatus("trainer", "trainer-0", "b", "here", os.getpid(), "", "training", 0, 0, {}), 600.0)
    done = dict.fromkeys(("prepared_step", "committed_step", "retired_step"), 0) | {"published_version": 1}
    await store.client.hset(store.keys.run, mapping=done)  # type: ignore[misc]
    await store.monitor.record({"step": 0.0, "reward/train/mean": 0.5})
    await store.close()


def questions(monkeypatch: pytest.MonkeyPatch, act: Callable[[], int]) -> tuple[int, list[str]]:
    """Run `act` on a terminal where the user answers no; return the exit code and the questions."""
    asked = list[str]()
    with monkeypatch.context() as terminal:
        terminal.setattr("sys.stdin.isatty", lambda: True, raising=False)
        terminal.setattr("sys.stderr.isatty", lambda: True, raising=False)
        terminal.setattr(typer, "confirm", lambda question, err: asked.append(question) or False)
        return act(), asked


def test_commands_work_on_a_stopped_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's own Redis server is down. Each command starts it briefly, and requests persist."""
    import asyncio

    monkeypatch.setenv(PLAIN, "1")  # otherwise the first fork waits for the zygote, which a command reports
    monkeypatch.chdir(tmp_path)
    config = small_config(tmp_path, None, 'run.dir="runs"', "fleet.ttl_s=600")
    folder = RunFolder.of(config)
    folder.write(config)
    server = start_server(folder.redis, folder.path.name)
    asyncio.run(begin(folder, server))
    server.stop()

    code, text, errors = grpo(capsys, "status")
    assert (code, errors) == (0, "")
    for expected in ("small", "1/4 steps", "stopped", "step 0 (1/4)", "reward 0.500", "trainer-0", "training"):
        assert expected in text
    assert LONG_NAME in text, "without a terminal, as in kubectl exec, names are not truncated"
    _, text, errors = grpo(capsys, "pause", "small", "--role", "generator", "--why", "maintenance")
    assert "generator paused" in " ".join(text.split()), errors
    state = json.loads(grpo(capsys, "status", folder.path, "--json")[1])["state"]
    assert state["paused"] == {"generator": f"{getpass.getuser()}: maintenance"}
    assert "applies this when it resumes" in grpo(capsys, "pause", "small")[1]
    assert f"stopped: it starts paused: all services by {getpass.getuser()}" in " ".join(
        grpo(capsys, "status", "small")[1].split()
    )
    assert grpo(capsys, "resume", "small", "--why", "done")[0] == 0
    assert json.loads(grpo(capsys, "status", "small", "--json")[1])["state"]["last_resume"] == f"{getpass.getuser()}: done"
    assert grpo(capsys, "pause", "small", "--role", "king")[0] == 2
    assert questions(monkeypatch, lambda: grpo(capsys, "stop", "nowhere")[0]) == (2, [])
    question = "End run small in runs/small permanently? To resume it later, press Ctrl-C in grpo run instead."
    assert questions(monkeypatch, lambda: grpo(capsys, "stop")[0]) == (130, [question]), "the newest run is named"
    assert json.loads(grpo(capsys, "status", "small", "--json")[1])["state"]["stopping"] == ""
    code, _, errors = grpo(capsys, "stop", "small", "--why", "enough")
    assert (code, errors) == (0, "")
    status = json.loads(grpo(capsys, "status", "small", "--json")[1])
    assert (status["state"]["paused"], status["state"]["stopping"]) == ({}, f"{getpass.getuser()}: enough")
    assert (status["pods"][0]["name"], status["last_step"]["step"]) == ("trainer-0", 0.0)
    assert status["pods"][0]["age_s"] >= 0
    assert json.loads(grpo(capsys, "pause", "small", "--json")[1])["done"].startswith("run small: ")
    for words in (["3"], ["generators", "2", "small"], ["1", "small"]):
        assert f"desired generators set to {words[-1] if len(words) == 1 else words[-2]}" in grpo(capsys, "scale", *words)[1]
    assert "is not a number of generators: write grpo scale N [RUN]" in grpo(capsys, "scale", "small", "2")[2]
    code, text, _ = grpo(capsys, "audit", "small", "--json")
    assert (code, json.loads(text)["lost"]) == (0, 0)
    assert "issued" in grpo(capsys, "audit", "small")[1]
