"""Which folder `grpo run` may use: it replaces a run that trained nothing, and deletes any other only on confirmation."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest
import typer

from services.config import RunConfig, digest
from services.console import options as shared
from services.console.doctor import Finding, note, ok
from services.console.run import command
from services.console.run.folder import RunFolder
from services.console.run.place import Options, checked, fresh_or_asked
from services.console.run.redis_server import start_server
from services.console.run.resumption import again
from services.store import Store
from tests.support.console import LIMIT_S, config_file, grpo, launched, steps, wait_until
from tests.support.harness import small_config

FILE = Path("run.toml")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Simulate a terminal where the user answers no; return the questions."""
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(shared.typer, "confirm", lambda question, err: asked.append(question) or False)
    return asked


def held(folder: Path, trained: bool) -> tuple[RunConfig, RunFolder]:
    config = small_config(folder)
    run = RunFolder.of(config)
    run.write(config)
    if trained:
        run.metrics.write_text(json.dumps({"step": 0}) + "\n")
    return config, run


def test_a_run_that_trained_nothing_is_replaced(tmp_path: Path) -> None:
    file, run = config_file(tmp_path), tmp_path / "small"
    held(tmp_path, trained=False)
    done = grpo("run", file, "run.seed=7", "run.steps=2")
    assert done.returncode == 0, done.stderr
    assert "had another configuration and had trained no step: replacing it" in done.stdout
    assert steps(run) == [0, 1]
    done = grpo("run", file, "run.seed=8", "run.steps=2")
    assert (done.returncode, steps(run)) == (2, [0, 1])
    assert "run.seed is 7 there and 8 here" in done.stderr
    assert "continue from a checkpoint with grpo fork, or delete it with --fresh" in done.stderr


def test_steps_known_only_to_redis_count(tmp_path: Path) -> None:
    """As if the console had been killed before it wrote the first step's record."""
    config, run = held(tmp_path, trained=False)
    server = start_server(run.redis, config.run.name)

    async def train() -> None:
        store = await Store.connect(server.url, config.run.name, server.password)
        await store.run.create(digest(config), "data", 4, config.slots)
        await store.client.hset(store.keys.run, "committed_step", 0)
        await store.close()

    try:
        asyncio.run(train())
    finally:
        server.stop()
    done = grpo("run", config_file(tmp_path), "run.seed=7")
    assert done.returncode == 2
    assert "run.seed is 0 there and 7 here" in done.stderr


@pytest.mark.parametrize(("trained", "yes", "asks"), [(True, False, True), (True, True, False), (False, False, False)])
def test_fresh_asks_before_it_deletes_trained_steps(
    tmp_path: Path, terminal: list[str], trained: bool, yes: bool, asks: bool
) -> None:
    config, run = held(tmp_path, trained)
    options = Options(FILE, fresh=True, yes=yes)
    if asks:
        with pytest.raises(typer.Exit) as ended:
            fresh_or_asked(options, config, run, lambda: 1)
        assert ended.value.exit_code == 130
        assert terminal == [f"Delete run small in {run.path}, which has trained, and start over?"]
    else:
        assert fresh_or_asked(options, config, run, lambda: 0) == options
        assert terminal == []


def test_a_resumed_run_is_neither_replaced_nor_asked_about(tmp_path: Path, terminal: list[str]) -> None:
    config, run = held(tmp_path, trained=False)
    assert not fresh_or_asked(Options(FILE), config, run, lambda: 0).fresh
    other = config.model_copy(update={"run": config.run.model_copy(update={"seed": 9})})
    assert fresh_or_asked(Options(FILE), other, run, lambda: 0).fresh
    assert terminal == []


def test_notes_are_shown_when_a_run_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = note("evaluation source test", "2 of its 9 prompts", "remove them")
    found = [ok("model", "a small one"), note("loss", "said later"), known]
    checked(Options(config_file(tmp_path)), lambda _: found, lambda _, __: [])
    assert capsys.readouterr().out == "note: evaluation source test: 2 of its 9 prompts: remove them\n"


def test_json_goes_to_stdout_and_everything_else_to_stderr(tmp_path: Path) -> None:
    done = grpo("run", config_file(tmp_path), "run.steps=2", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["status"], summary["steps"], summary["lost"]) == ("finished", 2, 0)
    assert "step 1 (2/2)" in done.stderr


def test_the_summary_is_of_this_start_whatever_becomes_of_the_file(tmp_path: Path) -> None:
    file = config_file(tmp_path)
    with launched("run", file, "run.steps=100000", "--json") as console:
        wait_until(lambda: len(steps(tmp_path / "small")) > 1, "the first steps")
        file.write_text("edited [")
        console.send_signal(signal.SIGINT)
        output, errors = console.communicate(timeout=LIMIT_S)
    assert console.returncode == 130, errors
    assert json.loads(output)["status"] == "stopped"


def test_the_summary_of_a_failed_run_is_printed(tmp_path: Path) -> None:
    done = grpo("run", config_file(tmp_path), "--json", FAKE_EXIT="dataprep-0:2:no such file")
    assert done.returncode == 2
    assert json.loads(done.stdout)["status"] == "failed"
    assert "error: dataprep-0" in done.stderr


def test_no_earlier_summary_is_printed_for_a_run_that_was_not_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: RunConfig) -> list[Finding]:
        raise KeyboardInterrupt

    file = config_file(tmp_path)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "summary.json").write_text('{"status": "finished"}')
    assert command.run(Options(file, as_json=True), check=interrupted) == 130
    assert capsys.readouterr().out == ""


def test_the_command_that_resumes_repeats_neither_resume_nor_fresh() -> None:
    """A repeated `--resume 5` would go back to step 5 again. The suggested command does not contain the password of Redis."""
    given = ["run", "my.toml", "--resume", "5", "run.steps=9", "--fresh", "--redis-url", "redis://ada:secret@host:6379/0"]
    assert again(given) == ["run", "my.toml", "run.steps=9", "--redis-url", "redis://ada:PASSWORD@host:6379/0"]
    assert again(["run", "--resume=7", "my.toml", "redis.url=redis://:secret@host"]) == [
        "run", "my.toml", "redis.url=redis://:PASSWORD@host",
    ]  # fmt: skip
    assert again(["--redis-url", "redis://ada:se@cr/et@host"])[1] == "redis://ada:PASSWORD@host", "no part of it is shown"
    keys = ["environments.0.options.api_key=sk-1", "redis.password_file=secrets/redis", "sampling.max_tokens=9"]
    assert again(keys) == ["environments.0.options.api_key=SECRET", *keys[1:]]
