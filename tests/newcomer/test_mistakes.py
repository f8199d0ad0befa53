"""Every newcomer's mistake is found before anything starts, with a line that names the key, its location, value and remedy.

`python -m tests.newcomer` makes them in separate processes, including those that hide packages or call a verifier.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from services.console.commands.__main__ import main
from services.console.doctor import functions
from services.console.run import command
from tests.newcomer import in_configuration, in_data, in_functions, in_machine, in_model
from tests.newcomer.mistakes import MISTAKES, refused
from tests.newcomer.world import make, make_model, unnamed

TABLES = (in_configuration, in_model, in_data, in_functions, in_machine)
CALLED = ("raises", "returns_text", "no_reward_file", "no_token")
"""The mistakes made here among those that call a verifier, each of which takes a process."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("newcomer") / "model"
    make_model(folder)
    return folder


def started(*_: Any, **__: Any) -> None:
    raise AssertionError("it was started")


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__.rpartition(".")[2])
def test_mistakes_are_found_and_named(table: ModuleType, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = list[str]()
    for mistake in table.MISTAKES:
        if "HIDDEN_PACKAGES" in mistake.environ or (mistake.calls and mistake.name not in CALLED):
            continue
        folder = tmp_path / mistake.name
        folder.mkdir()
        make(folder, model)
        for edit in mistake.edits:
            edit(folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            for name, value in ({"CUDA_VISIBLE_DEVICES": ""} | mistake.environ).items():
                patch.setenv(name, value)
            patch.setattr(command, "start_server", started)
            if not mistake.calls:
                patch.setattr(functions, "verifiers", lambda config, work, remote: ())
            code = main(["run", *(mistake.arguments or ["my.toml"])])
        output = capsys.readouterr().err
        if not refused(code, folder):
            wrong.append(f"{mistake.name}: exit code {code}, not refused: {output}")
        wrong += [f"{mistake.name}: {part!r} is not named: {output}" for part in unnamed(mistake, folder, output)]
    assert not wrong, "\n".join(wrong)


def test_there_are_enough_mistakes_with_unique_names() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 60


def test_a_folder_without_a_mistake_is_not_rejected(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(command, "start_server", started)
    with pytest.raises(AssertionError, match="it was started"):
        main(["run", "my.toml"])
    assert capsys.readouterr().err == ""


def test_all_mistakes_of_a_file_are_named_at_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mistakes are in keys, rules, the model, the data and functions."""
    chosen = ("text_for_number", "mini_batches", "cut_weights", "not_json", "no_loss", "one_port_for_all")
    mistakes = [next(one for one in MISTAKES if one.name == name) for name in chosen]
    make(tmp_path, model)
    for mistake in mistakes:
        for edit in mistake.edits:
            edit(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "my.toml"]) == 2
    output = capsys.readouterr().err
    assert [one.name for one in mistakes if unnamed(one, tmp_path, output)] == [], output
    assert os.listdir(tmp_path / "runs") == [] if (tmp_path / "runs").exists() else True
