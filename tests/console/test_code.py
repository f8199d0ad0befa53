"""Reward code is copied into the run's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.config import ConfigError, RunConfig, digest, load, load_resolved
from services.console.code import with_kept_code
from services.console.errors import ConsoleError
from services.console.run.folder import RunFolder
from services.console.run.place import judged_as_before
from tests.support.harness import small_config

ONE, OTHER = "def score(completion):\n    return 1\n", "def score(completion):\n    return 2\n"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "rewards.py").write_text(ONE)
    return configured(tmp_path)


def configured(folder: Path, *overrides: str) -> RunConfig:
    own = f'verifiers=[{{kind="python", function="{folder}/rewards.py:score"}}, {{kind="exact"}}]'
    return small_config(folder, None, own, *overrides)


def function(config: RunConfig) -> str:
    verifier = config.verifiers[0]
    assert verifier.kind == "python"
    return verifier.function


def test_paths_are_relative_to_the_configuration_file(tmp_path: Path) -> None:
    small_config(tmp_path)
    (tmp_path / "rewards.py").write_text(ONE)
    config = load(tmp_path / "run.toml", ['verifiers=[{kind="python", function="rewards.py:score"}]'], environ={})
    assert function(config) == f"{tmp_path}/rewards.py:score"


def test_a_resumed_run_keeps_its_original_code(config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.of(config)
    written = folder.write(config)
    copy = Path(function(written).rpartition(":")[0])
    assert copy.is_relative_to(folder.code.absolute())
    assert copy.read_text() == ONE
    assert digest(written) == digest(config) == digest(load_resolved(folder.config)), "the folder does not matter"
    assert judged_as_before(config, folder) == written
    assert capsys.readouterr().err == ""

    (tmp_path / "rewards.py").write_text(OTHER)
    assert digest(config) != digest(written), "the content matters"
    again = judged_as_before(config, folder)
    assert again == written
    assert folder.check(again)
    assert "rewards.py has changed since the run began; the run continues with the copy in" in capsys.readouterr().err
    folder.write(again)
    assert copy.read_text() == ONE

    (tmp_path / "rewards.py").unlink()
    assert with_kept_code(config, written) == (written, [str(tmp_path / "rewards.py")])
    folder.clear()
    assert not copy.exists()


def test_a_start_killed_in_the_middle_of_a_copy_leaves_none(config: RunConfig, tmp_path: Path) -> None:
    folder = RunFolder.of(config)
    copy = Path(function(folder.write(config)).rpartition(":")[0])
    folder.config.unlink()  # as if the start had been killed before the run began
    copy.write_text(ONE[:5])
    folder.write(config)
    assert copy.read_text() == ONE
    (tmp_path / "rewards.py").write_text(OTHER)
    folder.config.unlink()
    written = folder.write(config)
    assert copy.read_text() == OTHER, "the run that begins now has the code of now"
    assert digest(written) == digest(config)
    assert [path.name for path in copy.parent.iterdir()] == ["rewards.py"]


def test_another_function_makes_another_run(config: RunConfig, tmp_path: Path) -> None:
    folder = RunFolder.of(config)
    folder.write(config)
    (tmp_path / "rewards.py").write_text(ONE + OTHER.replace("score", "other"))
    changed = config.model_copy(
        update={"verifiers": [config.verifiers[0].model_copy(update={"function": f"{tmp_path}/rewards.py:other"})]}
    )
    with pytest.raises(ConsoleError, match="a run with another configuration: verifiers"):
        folder.check(judged_as_before(changed, folder))


def test_a_missing_file_is_named(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").unlink()
    with pytest.raises(ConfigError, match=r"rewards\.py, cannot be read \(No such file or directory\): correct the path"):
        digest(config)
