"""`grpo score`, and the checks of `grpo run` and `grpo doctor` that call verifiers in real worker processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.config import RunConfig, load
from services.console.commands.__main__ import main
from services.console.doctor import Finding
from services.console.doctor.functions import functions, verifiers
from services.console.doctor.rows import data
from services.console.doctor.work import Work
from tests.support.harness import save_tokenizer_folder, small_config

OWN = """
def score(completion, answer, row, prompt):
    if completion == "raise":
        raise KeyError(completion)
    return {"score": completion.count(answer), "asked": prompt[-1]["content"]}

def ranked(completions):
    return sorted(range(len(completions)), key=lambda i: len(completions[i]))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a configuration file, beside a model folder, forty questions and a custom reward."""
    save_tokenizer_folder(tmp_path / "model")
    small_config(tmp_path)
    (tmp_path / "my_rewards.py").write_text(OWN)
    path = tmp_path / "run.toml"
    text = path.read_text()
    path.write_text(text.replace('kind = "exact"', 'kind = "python"\nfunction = "my_rewards.py:score"'))
    assert "my_rewards" in path.read_text()
    return path


def test_completions_of_a_file_are_scored(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    lines = [
        {"completion": rows[3]["answer"] * 2, "row": 3},
        {"completion": ["7", "no", "77"], "prompt": "what?", "answer": "7"},
    ]
    given = tmp_path / "completions.jsonl"
    given.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert main(["score", str(file), "--completions", str(given), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["reward"] for one in found["completions"]] == [2, 1, 0, 2]
    assert [one["where"][-2:] for one in found["completions"]] == [":1", ":2", ":2", ":2"]
    assert found["completions"][1]["note"] == {"python": {"asked": "what?"}}
    assert (found["rewards"], found["failures"], found["mean"]) == (4, 0, 1.25)
    assert main(["score", str(file), "verifiers.0.solved_at=1", "--completions", str(given)]) == 0
    out = capsys.readouterr().out
    assert "4 scored, 0 failed, mean reward 1.25" in out
    assert out.count("yes") == 3


def test_a_failure_is_shown_and_the_others_are_scored(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = tmp_path / "completions.jsonl"
    given.write_text('{"completion": "raise", "row": 0}\n{"completion": "", "row": 1}\n')
    assert main(["score", str(file), "--completions", str(given)]) == 1
    out = capsys.readouterr().out
    assert "1 scored, 1 failed, mean reward 0" in out
    assert "failed: verifier 'python' failed: KeyError: 'raise' (my_rewards.py:4)" in out


def test_output_of_the_function_is_shown(file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my_rewards.py").write_text("def score(completion):\n    print('seen', completion, flush=True)\n    return 1\n")
    assert main(["score", str(file)]) == 0
    assert "seen 0" in capfd.readouterr().out
    assert main(["score", str(file), "--json"]) == 0
    assert "seen" not in capfd.readouterr().out


def test_a_file_that_imports_another_is_rejected_as_in_a_run(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "helper_of_rewards.py").write_text("WORD = 'x'\n")
    (tmp_path / "my_rewards.py").write_text("import helper_of_rewards\n\ndef score(completion):\n    return 1\n")
    assert main(["score", str(file)]) == 2
    assert "No module named 'helper_of_rewards'" in capsys.readouterr().err


def test_a_source_that_only_its_environment_scores_is_rejected(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = 'environments=[{name = "world", kind = "python", function = "world.py:World"}]'
    assert main(["score", str(file), world, 'data.sources.0.environment="world"', "verifiers=[]"]) == 2
    assert "source 'main' has no verifier: its environment scores it" in capsys.readouterr().err


def test_completions_that_an_environment_scores_too_are_not_judged(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The environment's score decides whether a completion counts as solved, and needs a rollout."""
    (file.parent / "world.py").write_text("class World: ...\n")
    world = 'environments=[{name = "world", kind = "python", function = "world.py:World", solved_at = 1.0}]'
    given = [world, 'data.sources.0.environment="world"', "verifiers.0.solved_at=1", "--json"]
    assert main(["score", str(file), *given]) == 0
    [found] = json.loads(capsys.readouterr().out)["completions"]
    assert (found["reward"], found["solved"]) == (1, None)


def test_groups_are_scored_together(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = tmp_path / "completions.jsonl"
    given.write_text('{"completion": ["bbb", "a", "cc"], "row": 0}\n')
    overrides = ['verifiers.0.scope="group"', 'verifiers.0.function="my_rewards.py:ranked"']
    assert main(["score", str(file), *overrides, "--completions", str(given), "--json"]) == 0
    assert [one["reward"] for one in json.loads(capsys.readouterr().out)["completions"]] == [1, 2, 0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no json", "c.jsonl:1: "),
        ('{"row": 1}', "missing required field `completion`"),
        ('{"completion": "x", "row": 4000}', 'c.jsonl:1: row = 4000, but source "main" has rows 0 to 39: correct it'),
        ('{"completion": "x"}', "no field 'prompt'"),
        ('{"completion": [], "row": 1}', "completion is an empty list"),
        ('{"completion": "x", "row": 1, "source": "y"}', "source = 'y' is not a prompt source: choose from main"),
        ("", "the file is empty: add lines"),
    ],
)
def test_a_malformed_line_is_named(
    file: Path, tmp_path: Path, line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.jsonl").write_text(line + "\n")
    assert main(["score", str(file), "--completions", str(tmp_path / "c.jsonl")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('verifiers.0.function="my_rewards.py:nothing"', "my_rewards.py:nothing': verifier 'python' cannot be used: "),
        ('verifiers.0.function="other.py:score"', "other.py, cannot be read (No such file or directory): correct the path"),
        ('verifiers.0.function="nosuch_module:score"', "ModuleNotFoundError: No module named 'nosuch_module'"),
        ("verifiers.0.range=[-2, 0]", "verifier 'python' failed: score 1 is outside its range [-2, 0]"),
        ('data.curriculum="nosuch.module:order"', "ModuleNotFoundError: No module named 'nosuch'"),
        ('data.curriculum="services.dataprep.prompts.curriculum:none"', "has no attribute 'none': fix the name or its module"),
        ("data.max_prompt_tokens=1", "the prompt has"),
    ],
)
def test_an_unusable_verifier_is_rejected_before_the_run(file: Path, override: str, message: str) -> None:
    assert faults(load(file, environ={})) == []
    (found,) = faults(load(file, [override], environ={}))
    assert message in found.line
    assert found.remedy


def faults(config: RunConfig) -> list[Finding]:
    return [one for one in (*data(config), *functions(config), *verifiers(config, Work(), remote=False)) if one.state == "fault"]
