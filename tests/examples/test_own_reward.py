"""The custom reward of the README: its data, its scores, and a run that trains on it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.own_reward.my_reward import score
from services.config import load
from tests.support.harness import save_model_folder

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "own_reward"
PAGE = (FOLDER / "README.md").read_text()


def grpo(*words: str) -> str:
    """Run `grpo` in the root of the repository, as on the page; return its output."""
    made = subprocess.run(
        [sys.executable, "-m", "services.console.commands", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "model"
    save_model_folder(folder)
    return folder


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / "sums.jsonl").read_text().splitlines()]


def test_the_data_are_sums_with_answers_and_steps() -> None:
    assert rows()
    for row in rows():
        asked = re.fullmatch(r"Calculate ([\d +-]+)\.", row["prompt"])
        assert asked is not None
        assert eval(asked[1]) == int(row["answer"])
        assert row["steps"] == len(re.findall(r"[+-]", asked[1]))


def test_a_right_answer_and_right_steps_earn_their_share() -> None:
    row = {"steps": 2}
    assert score("5 - 3 = 2, 2 - 6 = -4", "-4", row) == {"score": 1, "right": True, "shown": 1}
    assert score("5 - 3 = 2, 2 - 6 = 4", "-4", row) == {"score": 0.25, "right": False, "shown": 0.5}
    assert score("= -4", "-4", row) == {"score": 0.5, "right": True, "shown": 0}
    assert score("1 + 1 = 2, 1 + 1 = 2, 1 + 1 = 2", "-4", row)["score"] == 0.5, "extra steps earn nothing"
    assert score("", "-4", row)["score"] == 0


def test_the_readme_shows_the_function_and_the_command() -> None:
    readme = (ROOT / "README.md").read_text().split("## A reward of your own\n", 1)[1].split("\n## ", 1)[0]
    assert f"```python\n{(FOLDER / 'my_reward.py').read_text()}```" in readme
    assert "grpo run examples/own_reward/config.toml" in readme


def test_scoring_without_a_run_prints_what_the_page_shows(model: Path, tmp_path: Path) -> None:
    (line,) = re.findall(r"^echo '(.*)' > ", PAGE, re.MULTILINE)
    (command,) = re.findall(r"^grpo (score .*)$", PAGE, re.MULTILINE)
    completions = tmp_path / "completions.jsonl"
    completions.write_text(line)
    words = [str(completions) if word == "/tmp/completions.jsonl" else word for word in shlex.split(command)]
    found = json.loads(grpo(*words, "--json", f"model.path={model}"))["completions"]
    shown = [entry.split() for entry in re.findall(r"^completions\.jsonl:1 (.*)$", PAGE, re.MULTILINE)]
    assert len(shown) == len(found) == 3
    for one, words in zip(found, shown, strict=True):
        assert " ".join(words[:-5]) == one["completion"]
        judged, *numbers = words[-4], words[-5], *words[-3:]
        assert [float(number) for number in numbers] == [one["reward"], *one["scores"].values()]
        assert judged == ("yes" if one["solved"] else "no")


@pytest.mark.slow
def test_a_run_trains_with_the_reward_function(model: Path, tmp_path: Path) -> None:
    """The scripted engine answers with one or two digits, some of which are right by chance."""
    (command,) = re.findall(r"^grpo (run \S+)", PAGE, re.MULTILINE)
    vocabulary = [20, 30]  # the tokens 0 to 9
    overrides = (
        f"run.dir={tmp_path}", "run.steps=2", f"model.path={model}", "model.max_tokens=64", "sampling.max_tokens=2",
        "generator.engine=tests.support.scripted:ScriptedEngine", f"generator.engine_options={{vocabulary={vocabulary}}}",
        "generator.count=1", "filters.zero_std=false",
    )  # fmt: skip
    output = grpo(*command.split(), "--no-screen", *overrides)
    assert "0 tickets lost, 0 duplicated" in output
    run = tmp_path / load(FOLDER / "config.toml", environ={}).run.name
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 2
    for record in records:
        right, shown = record["reward/train/python.right"], record["reward/train/python.shown"]
        assert 0 < right < 0.5
        assert record["reward/train/mean"] == pytest.approx((right + shown) / 2)
    assert (run / "code" / "python" / "my_reward.py").read_text() == (FOLDER / "my_reward.py").read_text()
