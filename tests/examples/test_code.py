"""The code example: its model's moves, its chat template, and a rollout with the real tool."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest

from examples.code.moves import OFFERED, call, moves, printing, replies
from examples.tools.warmstart import warm_start
from services.chat.format import ChatFormat
from services.config import load
from services.dataprep.prompts.catalogue import PromptSource
from services.environment.programs.code_tool import CodeTool

FOLDER = Path(__file__).parents[2] / "examples" / "code"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a briefly trained model."""
    made = tmp_path_factory.mktemp("model") / "code"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("examples.code.teaching.HELD_OUT", 4)
        assert warm_start(FOLDER, "examples.code.teaching", ["--out", str(made), "--steps", "2", "--conversations", "200"]) == 0
    return made


async def test_the_tool_replies_as_the_lessons_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tool = CodeTool(f"example-{os.getpid()}", 10)
    for program, reply in replies(347, 85).items():
        assert await tool.call({"code": program}) == reply
    await tool.close()
    assert [replies(347, 85)[program] for program in printing(347, 85)] == ["29495"] * 2


def test_one_program_in_three_prints_the_product() -> None:
    shown = [moves(random.Random(seed)) for seed in range(2000)]
    ran = [conversation for conversation in shown if len(conversation) == 2]
    assert 0.72 < len(ran) / len(shown) < 0.78, "the others are guesses"
    right = 0
    for program, report in ran:
        a, b = map(int, re.findall(r"Calculate (\d+) \* (\d+)\.", program.context)[0])
        right += program.completion in map(call, printing(a, b))
        assert (report.completion == f"= {a * b}") == (program.completion in map(call, printing(a, b)))
    assert 0.3 < right / len(ran) < 0.37


def test_prompts_and_lessons_are_rendered_identically(model: Path) -> None:
    config = load(FOLDER / "config.toml", [f"model.path={model}"], environ={})
    chat, tool = ChatFormat(model, config.data), CodeTool("example", 10)
    prompt = chat.decode(PromptSource(config).prompt(0).tokens)
    assert prompt.startswith(f"{OFFERED}<|user|>Calculate ")
    for program in replies(347, 85):
        [parsed] = chat.parse(call(program), [tool.described]).calls
        assert (parsed.name, parsed.arguments) == ("python", {"code": program})
    longest = max(len(chat.encode(move.context + move.completion)) for seed in range(50) for move in moves(random.Random(seed)))
    assert longest + 10 < config.model.max_tokens
