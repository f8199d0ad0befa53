"""Unmodified environments of the PyPI library verifiers, against a real door with a scripted policy."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.config import ConfigError, digest, to_toml
from services.config.environments import VerifiersEnvironment
from services.console.commands.__main__ import main
from services.environment.programs.process import ProgramFailed
from tests.environment.programs.test_programs import process
from tests.environment.support.rollouts import ScriptedRollout, ScriptedRollouts, served
from tests.environment.support.templates import FAMILIES
from tests.environment.support.verifiers_venv import make_interpreter
from tests.support.console import ROOT
from tests.support.harness import small_config
from tests.support.once import once

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # importing the library takes 6 s of CPU time per process
KEY = "rollout-key"


def made(places: pytest.TempPathFactory) -> Path:
    """Return the Python of a virtual environment with the library."""
    with once(places, "verifiers") as (folder, new):
        if new:
            make_interpreter(folder)
    return folder / "bin" / "python"


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory)


@pytest.fixture
def rollout() -> ScriptedRollout:
    return ScriptedRollout(FAMILIES[0], "verifiers")


@pytest.fixture
def url(rollout: ScriptedRollout) -> Iterator[str]:
    with served(ScriptedRollouts({KEY: rollout})) as address:
        yield f"{address}/v1"


def environment(name: str, python: Path, **keys: Any) -> VerifiersEnvironment:
    return VerifiersEnvironment(name=name, kind="verifiers", interpreter=str(python), **keys)


ROWS = {"start": 0, "count": 100, "evaluation": False, "limited": False}


async def test_an_environment_runs_its_own_rows_without_a_network(python: Path, rollout: ScriptedRollout, url: str) -> None:
    async with process(environment("v1-single", python, options={"taskset": {"rows": 2}})) as one:
        rows = (await one.do("rows", "rows", ROWS)).value
        assert [row["answer"] for row in rows] == ["1", "2"]
        assert rows[0]["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 0 + 1?"}]
        rollout.said += ["It is 12."]
        given = {"url": url, "key": KEY, "row": rows[1]}
        assert (await one.do("a", "run", given)).value == {"digits": 0.5, "characters": 9.0, "score": 0.5}
        assert "What is 1 + 1?" in rollout.chat.decode(rollout.policy.asked[0].given)
        faults = {
            "could not run the rollout: ProviderError": given | {"key": "unknown"},
            "row 0 of the environment's data is not what it was: write the rows again": given | {"row": rows[1] | {"row": 0}},
            "row 2 of the environment's data does not exist": given | {"row": rows[1] | {"row": 2}},
            "lacks the columns `row` and `digest`": given | {"row": {"prompt": [], "answer": ""}},
        }
        for why, row in faults.items():
            with pytest.raises(ProgramFailed, match=why):
                await one.do("b", "run", row)


def test_rows_are_written_for_the_environments_sources(python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    path = tmp_path / "run.toml"
    environments = f'[{{name="v1_single", kind="verifiers", interpreter="{python}", solved_at=1}}]'
    sources = [
        f'{name}.sources=[{{name="{name}", kind="jsonl", path="{tmp_path}/{name}-rows.jsonl", environment="v1_single", '
        f'prompt_field="question"}}]'
        for name in ("data", "evaluation")
    ]
    given = (f"environments={environments}", *sources, "verifiers=[]", "evaluation.every_steps=2", "generator.count=2")
    path.write_text(to_toml(small_config(tmp_path, None, *given)))
    (tmp_path / "evaluation-rows.jsonl").write_text("kept")
    assert main(["rows", str(path), "--limit", "2", "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert [(each["source"], each["rows"]) for each in files] == [("data", 2), ("evaluation", None)]
    lines = [json.loads(line) for line in (tmp_path / "data-rows.jsonl").read_text().splitlines()]
    assert [(line["row"], line["question"][-1]["content"], line["answer"]) for line in lines] == [
        (0, "What is 0 + 1?", "1"), (1, "What is 1 + 1?", "2"),
    ]  # fmt: skip
    assert (tmp_path / "evaluation-rows.jsonl").read_text() == "kept"
    assert main(["rows", str(path)]) == 0
    assert "data-rows.jsonl exists: kept" in capsys.readouterr().out
    assert sorted(each.name for each in tmp_path.glob("*-rows.jsonl*")) == ["data-rows.jsonl", "evaluation-rows.jsonl"]
    assert main(["rows", str(path), "environments.0.name=absent", "data.sources.0.environment=absent",
                 "evaluation.sources.0.environment=absent", "data.sources.0.path=other.jsonl"]) == 2  # fmt: skip
    assert "name = 'absent'" in capsys.readouterr().err


LOAD = """
import gc, json, sys
gc.disable()  # as workers do
from services.environment.programs.frames import ProgramSetup
from services.environment.programs.verifiers_library import LibraryEnvironment
from services.runtime.own_code import Unusable
for name, options in json.loads(sys.argv[1]):
    try: print(LibraryEnvironment(ProgramSetup("verifiers", environment=name, options=options)))
    except Unusable as error: print(error)
"""


def test_environment_errors_are_named(python: Path, tmp_path: Path) -> None:
    (tmp_path / "classic.py").write_text("def load_environment(): pass")
    faults = [
        ("absent", {}, r"name = 'absent': .* has no module 'absent': correct the name, or install the environment"),
        ("classic", {}, "name = 'classic' has load_environment of the library's classic API: only its v1 API is supported"),
        ("v1_single", {"taskset": {"row": 3}}, r"options = .*: taskset.row: Extra inputs are not permitted"),
        ("nemo-gym", {"taskset": {"row": 3}}, r"options = .*taskset.row: Extra inputs are not permitted"),
        ("json", {}, "name = 'json' is not an environment of verifiers"),
    ]
    command = [python, "-c", LOAD, json.dumps([fault[:2] for fault in faults])]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    text = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    for line, (_, _, why) in zip(text.splitlines(), faults, strict=True):
        assert re.search(why, line), text


def test_a_source_of_rows_needs_the_columns_row_and_digest(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    environments = 'environments=[{name="world", kind="verifiers"}]'
    source = f'kind="jsonl", path="{tmp_path}/rows.jsonl", environment="world"'
    with pytest.raises(ConfigError, match='columns of source "main" lack row and digest'):
        small_config(tmp_path, None, environments, f'data.sources=[{{{source}, columns=["row"]}}]', "verifiers=[]")
    config = small_config(tmp_path, None, environments, f"data.sources=[{{{source}}}]", "verifiers=[]")
    for change in ({"name": "other"}, {"options": {"split": "test"}}):
        [other] = [config.environments[0].model_copy(update=change)]
        assert digest(config) != digest(config.model_copy(update={"environments": [other]}))
