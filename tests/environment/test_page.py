"""The configurations of docs/environments.md are valid, and the classes on the pages can be scored and restored at any time."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from services.config import to_toml
from services.config.load import validate
from services.environment.programs.loaded import LoadedProgram
from tests.support.harness import save_tokenizer_folder, small_config

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "environments.md"
ROW = {"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}


def classes() -> dict[str, type]:
    """Return the classes with a method `score` on the pages, by page and name."""
    found: dict[str, type] = {}
    for page in (ROOT / "README.md", PAGE, ROOT / "docs" / "kubernetes.md"):
        for block in re.findall(r"```(?:python|yaml)\n(.*?)```", page.read_text(), flags=re.DOTALL):
            for text in re.finditer(r"^( *)class \w+:\n(?:(?:\1 +.*)?\n)*", block, re.MULTILINE):
                defined: dict[str, Any] = {}
                exec(dedent(text[0]), defined)
                name, made = next((name, each) for name, each in defined.items() if isinstance(each, type))
                found |= {f"{page.name}:{name}": made} if hasattr(made, "score") else {}
    return found


CLASSES = classes()


def test_every_configuration_on_the_page_is_valid(tmp_path: Path) -> None:
    save_tokenizer_folder(tmp_path / "model")
    base = tomllib.loads(to_toml(small_config(tmp_path, None, "evaluation.every_steps=0")))
    kinds: list[str] = []
    for block in re.findall(r"```toml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        tree = tomllib.loads(block)
        if "data" not in tree:
            continue
        config = validate({**base, "verifiers": [], **tree, "data": {**base["data"], **tree["data"]}}, "docs/environments.md")
        kinds += [environment.kind for environment in config.environments]
    assert set(kinds) == {"python", "mcp", "agent", "verifiers"}


def test_all_classes_are_found() -> None:
    assert list(CLASSES) == ["README.md:SecondTry", "environments.md:Calculator", "kubernetes.md:Calculator"]


@pytest.mark.parametrize("name", CLASSES)
async def test_a_rollout_whose_first_reply_is_cut_off_is_scored(name: str) -> None:
    program = LoadedProgram(CLASSES[name]())
    await program.start(ROW)
    assert await program.score() == {"score": 0}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("replies", [["4"], ["5"], []])
async def test_a_rollout_is_scored_after_its_replies_also_if_restored_after_any_of_them(name: str, replies: list[str]) -> None:
    program = LoadedProgram(CLASSES[name]())
    done = await program.start(ROW)
    for said in replies:
        done = await program.turn({"role": "assistant", "content": said})
    expected = {"score": float(replies == ["4"])}
    assert await program.score() == expected
    if hasattr(CLASSES[name], "restore"):
        other = LoadedProgram(CLASSES[name]())
        await other.restore(json.loads(json.dumps(done["snapshot"])))
        assert await other.score() == expected
        await other.turn({"role": "assistant", "content": "4"})
        assert await other.score() == {"score": 1}
