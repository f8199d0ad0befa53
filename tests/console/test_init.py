"""`grpo init` and `grpo --version`."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from services.config import load
from services.config.data import FileSource, ReasoningGymSource
from services.console.__main__ import main
from services.console.commands.init import init


def test_the_file_loads_and_says_what_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, data = tmp_path / 'a "model"', tmp_path / "prompts.jsonl"
    model.mkdir()
    data.write_text(json.dumps({"prompt": "1 + 1?", "answer": "2"}) + "\n")
    assert main(["init", "--model", str(model), "--data", str(data)]) == 0
    config = load("run.toml", environ={})
    (source,) = config.data.sources
    assert isinstance(source, FileSource)
    assert (config.run.name, config.model.path, source.kind, source.path) == ("run", str(model), "jsonl", str(data))
    assert [verifier.kind for verifier in config.verifiers] == ["math"]


def test_without_data_the_file_runs_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sums.toml"
    assert main(["init", str(file)]) == 0
    assert f"grpo run {file}" in capsys.readouterr().out
    config = load(file, environ={})
    assert config.run.name == "sums"
    assert isinstance(config.data.sources[0], ReasoningGymSource)


def test_parquet_is_told_by_its_name(tmp_path: Path) -> None:
    init(tmp_path / "run.toml", "model", "rows.parquet")
    assert load(tmp_path / "run.toml", environ={}).data.sources[0].kind == "parquet"


def test_a_file_name_that_is_no_run_name_gives_the_default_name(tmp_path: Path) -> None:
    init(tmp_path / "my run.toml", "model", "")
    assert load(tmp_path / "my run.toml", environ={}).run.name == "run"


def test_an_existing_file_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text("mine")
    assert main(["init", str(file)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "prompts.csv"], "must end in .jsonl or .parquet"),
        (["no/such/folder/run.toml"], "No such file or directory"),
    ],
)
def test_what_cannot_be_written_is_said_in_a_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"grpo {importlib.metadata.version('grpo')}\n"
