"""The example for GPUs: its configuration, its data, and the changes that its page suggests."""

from __future__ import annotations

import gzip
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.config import RunConfig, load
from services.config.data import FileSource
from services.dataprep.prompts.rows import PromptRow, read_rows

FOLDER = Path(__file__).parents[2] / "examples" / "gsm8k"
DATA = Path(__file__).parents[1] / "data" / "gsm8k"
SUGGESTED = [
    code
    for code in re.findall(r"`([^`\n]+)`", (FOLDER / "README.md").read_text())
    if all(re.fullmatch(r"[a-z_]+\.[a-z_]+=\S+", word) for word in code.split())
]


def configured(*overrides: str) -> RunConfig:
    return load(FOLDER / "config.toml", overrides, environ={})


def rows(sources: Sequence[object], name: str, folder: Path) -> list[PromptRow]:
    """Read the published file with the keys of the example's source."""
    (source,) = sources
    assert isinstance(source, FileSource)
    assert source.path == f"hf://datasets/openai/gsm8k/main/{name}-*.parquet"
    file = folder / f"{name}.jsonl"
    file.write_bytes(gzip.decompress((DATA / f"{name}.jsonl.gz").read_bytes()))
    return list(read_rows(source.model_copy(update={"kind": "jsonl", "path": str(file)})))


def test_every_problem_has_a_numeric_answer(tmp_path: Path) -> None:
    config = configured()
    train, test = rows(config.data.sources, "train", tmp_path), rows(config.evaluation.sources, "test", tmp_path)
    assert (len(train), len(test)) == (7473, 1319)
    assert all(re.fullmatch(r"-?[\d,]+(\.\d+)?", row.answer) for row in train + test)
    assert max(len(row.prompt) for row in train + test) == 985


def test_the_question_asks_for_a_boxed_answer() -> None:
    assert configured().data.user_template == "{prompt}\n\nPut the final answer in \\boxed{}."


@pytest.mark.parametrize("settings", SUGGESTED)
def test_the_suggested_settings_are_valid(settings: str) -> None:
    assert configured(*settings.split())


def test_the_page_suggests_three_settings() -> None:
    assert len(SUGGESTED) == 3
