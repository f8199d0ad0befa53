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
from services.console.__main__ import main
from services.environment.programs.process import ProgramFailed
from tests.environment.programs.test_programs import process
from tests.environment.support.rollouts import ScriptedRollout, ScriptedRollouts, served
from tests.environment.support.templates import FAMILIES
from tests.environment.support.verifiers_venv import LACKING, make_interpreter
from tests.support.console import ROOT
from tests.support.harness import small_config
from tests.support.once import once

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # importing the library takes 6 s of CPU time per process
KEY = "rollout-key"


def made(places: pytest.TempPathFactory, version: str) -> Path:
    with once(places, f"verifiers-{version}") as (folder, new):
        if new:
            make_interpreter(folder, version)
    return folder / "bin" / "python"


@pytest.fixture(scope="session")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a virtual environment with version 0.3, which has both APIs."""
    return made(tmp_path_factory, min(LACKING))


@pytest.fixture(scope="session")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a virtual environment with version 0.4, which has only the v1 API."""
    return made(tmp_path_factory, max(LACKING))


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


async def test_a_classic_environment_runs_its_own_rows(older: Path, rollout: ScriptedRollout, url: str) -> None:
    async with process(environment("world", older, environment="someone/classic-single", options={"rows": 3})) as one:

        async def run(name: str, row: dict[str, Any]) -> dict[str, float]:
            return (await one.do(name, "run", {"url": url, "key": KEY, "row": row})).value

        rows = (await one.do("rows", "rows", ROWS)).value
        assert [(row["row"], row["answer"]) for row in rows] == [(0, "1"), (1, "2"), (2, "3")]
        assert rows[1]["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 1?"}]
        [held] = (await one.do("rows", "rows", ROWS | {"evaluation": True})).value
        rollout.said += ["It is 12.", "A word.", "A loop.", "A judge.", "A slow one.", "A busy one."]
        assert await run("a", held) == {"digits": 0.5, "num_turns": 1.0, "score": 0.5}
        assert "What is 8 + 1?" in rollout.chat.decode(rollout.policy.asked[0].given)
        for name in ("b", "b2"):
            assert (await run(name, rows[0]))["score"] == 0.0  # the library's score for a reward function that fails
        for name, raised in (
            ("c", "RuntimeError: no judgement"),
            ("c2", "TimeoutError: "),
            ("c3", "HTTPStatusError: Server error"),
        ):
            with pytest.raises(ProgramFailed, match=f"could not score the rollout: digits: {raised}"):
                await run(name, rows[0])
        rollout.broken = True
        with pytest.raises(ProgramFailed, match="could not run the rollout"):
            await run("d", rows[0])
        with pytest.raises(ProgramFailed, match="row 1 of the environment's data is not what it was: write the rows again"):
            await run("e", rows[0] | {"row": 1})
        with pytest.raises(ProgramFailed, match="does not exist"):
            await run("f", rows[0] | {"row": 3})
        with pytest.raises(ProgramFailed, match="lacks the columns `row` and `digest`"):
            await run("g", {"prompt": [], "answer": ""})


async def test_an_environment_of_the_v1_api_needs_no_network(newer: Path, rollout: ScriptedRollout, url: str) -> None:
    async with process(environment("v1-single", newer, options={"taskset": {"rows": 2}})) as one:
        rows = (await one.do("rows", "rows", ROWS)).value
        assert [row["answer"] for row in rows] == ["1", "2"]
        assert rows[0]["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 0 + 1?"}]
        rollout.said += ["It is 12."]
        given = {"url": url, "key": KEY, "row": rows[1]}
        assert (await one.do("a", "run", given)).value == {"digits": 0.5, "characters": 9.0, "score": 0.5}
        assert "What is 1 + 1?" in rollout.chat.decode(rollout.policy.asked[0].given)
        with pytest.raises(ProgramFailed, match="could not run the rollout: ProviderError"):
            await one.do("b", "run", given | {"key": "unknown"})


def test_rows_are_written_for_the_environments_sources(older: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    path = tmp_path / "run.toml"
    environments = f'[{{name="classic_single", kind="verifiers", interpreter="{older}", solved_at=1}}]'
    sources = [
        f'{name}.sources=[{{name="{name}", kind="jsonl", path="{tmp_path}/{name}-rows.jsonl", environment="classic_single", '
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
    assert main(["rows", str(path), "environments.0.environment=absent", "data.sources.0.path=other.jsonl"]) == 2
    assert "environment = 'absent'" in capsys.readouterr().err


LOAD = """
import gc, json, sys
gc.disable()  # as workers do
from services.environment.programs.frames import ProgramSetup
from services.environment.programs.verifiers_library.kind import loaded
from services.runtime.own_code import Unusable
for name, options in json.loads(sys.argv[1]):
    try: print(loaded(ProgramSetup("verifiers", environment=name, options=options)))
    except Unusable as error: print(error)
print("verifiers.v1" in sys.modules)
"""


@pytest.mark.parametrize(
    ("version", "faults"),
    [
        (
            "0.3.1",
            [
                ("absent", {}, r"environment = 'absent': .* has no module 'absent': correct the id, or install the environment"),
                ("classic_single", {"row": 3}, "unexpected keyword argument 'row'; load_environment takes rows"),
            ],
        ),
        (
            "0.4.0",
            [
                ("classic_single", {}, r"has the v1 API only; for the classic one run .* -m pip install 'verifiers>=0.3,<0.4'"),
                ("v1_single", {"taskset": {"row": 3}}, r"options = .*: taskset.row: Extra inputs are not permitted"),
                ("someone/nemo-gym", {"taskset": {"row": 3}}, r"options = .*taskset.row: Extra inputs are not permitted"),
                ("json", {}, "environment = 'json' is not an environment of verifiers"),
            ],
        ),
    ],
)
def test_environment_errors_are_named(
    version: str, faults: list[tuple[str, dict[str, Any], str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    given = json.dumps([fault[:2] for fault in faults])
    command = [made(tmp_path_factory, version), "-c", LOAD, given]
    text = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True).stdout
    *lines, new_api = text.splitlines()
    for line, (_, _, why) in zip(lines, faults, strict=True):
        assert re.search(why, line), text
    assert new_api == str(version == "0.4.0"), "the classic API takes half the time to import"


def test_a_source_of_rows_needs_the_columns_row_and_digest(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    environments = 'environments=[{name="world", kind="verifiers"}]'
    source = f'kind="jsonl", path="{tmp_path}/rows.jsonl", environment="world"'
    with pytest.raises(ConfigError, match='columns of source "main" lack row and digest'):
        small_config(tmp_path, None, environments, f'data.sources=[{{{source}, columns=["row"]}}]', "verifiers=[]")
    config = small_config(tmp_path, None, environments, f"data.sources=[{{{source}}}]", "verifiers=[]")
    for change in ({"environment": "other"}, {"options": {"split": "test"}}):
        [other] = [config.environments[0].model_copy(update=change)]
        assert digest(config) != digest(config.model_copy(update={"environments": [other]}))
