"""The tool example: its data, its model's chat template, its rewards, and the printed curve."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from examples.tools.calculator import Calculator
from examples.tools.curve import learned, main
from examples.tools.moves import OFFERED, moves
from examples.tools.warmstart import main as warm_start
from services.chat.format import ChatFormat
from services.config import load
from services.dataprep.prompts.catalogue import PromptSource
from services.environment.programs.loaded import LoadedProgram

FOLDER = Path(__file__).parents[2] / "examples" / "tools"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a briefly trained model."""
    made = tmp_path_factory.mktemp("model") / "tools"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("examples.tools.teaching.HELD_OUT", 4)
        assert warm_start(["--out", str(made), "--steps", "2", "--conversations", "200"]) == 0
    return made


def test_the_data_are_products_with_answers() -> None:
    rows = [json.loads(line) for line in (FOLDER / "products.jsonl").read_text().splitlines()]
    for row in rows:
        asked = re.fullmatch(r"Calculate (\d{3}) \* (\d{2})\.", row["prompt"])
        assert asked is not None
        assert int(asked[1]) * int(asked[2]) == int(row["answer"])
    assert len({row["prompt"] for row in rows}) == len(rows) == 640


def test_lessons_show_all_moves_equally_often() -> None:
    shown = [moves(random.Random(seed))[0] for seed in range(2000)]
    for begin in ("= ", *(f'<tool_call>{{"name": "{name}"' for name in Calculator.tools)):
        assert 0.2 < sum(move.completion.startswith(begin) for move in shown) / len(shown) < 0.3
    numbers = [re.findall(r"\d+", move.context)[-2:] for move in shown if move.completion.startswith("= ")]
    answers = [move.completion for move in shown if move.completion.startswith("= ")]
    right = sum(f"= {int(a) * int(b)}" == answer for (a, b), answer in zip(numbers, answers, strict=True))
    assert right <= 1, "direct answers are not taught"


async def test_prompts_and_lessons_are_rendered_identically(model: Path) -> None:
    config = load(FOLDER / "config.toml", [f"model.path={model}"], environ={})
    chat, source = ChatFormat(model, config.data), PromptSource(config)
    prompt = source.prompt(0)
    assert chat.decode(prompt.tokens).startswith(f"{OFFERED}<|user|>Calculate ")
    program = LoadedProgram(Calculator())
    tools = (await program.start({"answer": "29495"}))["tools"]
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 347, "b": 85}}</tool_call>'
    parsed = chat.parse(call, tools)
    assert [(one.name, one.arguments) for one in parsed.calls] == [("multiply", {"a": 347, "b": 85})]
    for turn in range(50):
        for move in moves(random.Random(turn)):
            parsed = chat.parse(move.completion, tools)
            assert bool(parsed.calls) == move.completion.startswith("<tool_call>")
            assert not parsed.error
    longest = len(chat.encode(moves(random.Random(1))[-1].context)) + 10
    assert longest < config.model.max_tokens


async def test_the_right_answer_earns_one_however_found() -> None:
    for text, reward in (("= 29495", 1.0), ("= 29494", 0.0), ("29495", 0.0), ("", 0.0)):
        program = LoadedProgram(Calculator())
        await program.start({"answer": "29495"})
        assert (await program.turn({"content": text}))["messages"] is None
        assert await program.score() == {"score": reward}


def test_the_curve_averages_ten_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve = [0.1] * 10 + [0.4] * 10 + [0.75] * 5
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"reward/train/mean": each}) + "\n" for each in curve))
    assert main([str(tmp_path)]) == 0
    assert learned(curve) == pytest.approx(0.475)
    assert capsys.readouterr().out.splitlines()[-1] == "learned: +0.475 (last ten steps minus the first ten)"
