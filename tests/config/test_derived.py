"""Lengths that a configuration does not set fit the model and the lengths that it sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.config import ConfigError, RunConfig, load
from services.config.derived import context_of


def _lengths(config: RunConfig) -> tuple[int, int, int, int]:
    return config.model.max_tokens, config.data.max_prompt_tokens, config.sampling.max_tokens, config.trainer.row_tokens


def _model(folder: Path, config: Any) -> Path:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def _configured(folder: Path, context: int | None, given: list[str]) -> RunConfig:
    path = "a/hub-name" if context is None else str(_model(folder, {"max_position_embeddings": context}))
    file = folder / "run.toml"
    file.write_text(f'[model]\npath = "{path}"\n[[data.sources]]\nkind = "jsonl"\npath = "d"\n[[verifiers]]\nkind = "exact"\n')
    return load(file, given, environ={})


MODEL, PROMPT, COMPLETION, ROW = "model.max_tokens=", "data.max_prompt_tokens=", "sampling.max_tokens=", "trainer.row_tokens="
TURNS = ("environments=[{kind='agent', name='e', run=['true']}]", "data.sources.0.environment=e")


@pytest.mark.parametrize(
    ("context", "given", "lengths"),
    [
        (None, [], (4096, 1024, 512, 4096)),
        (None, [MODEL + "1000"], (1000, 500, 500, 4096)),
        (None, [MODEL + "1300"], (1300, 788, 512, 4096)),
        (None, [PROMPT + "9000"], (9512, 9000, 512, 9512)),
        (None, [COMPLETION + "9000"], (10024, 1024, 9000, 10024)),
        (None, [PROMPT + "300", COMPLETION + "100"], (4096, 300, 100, 4096)),
        (None, [ROW + "8000"], (4096, 1024, 512, 8000)),
        (None, [MODEL + "9000"], (9000, 1024, 512, 4096)),
        (None, [MODEL + "9000", *TURNS], (9000, 1024, 512, 9000)),  # segments fill the model's context
        (100_000, [], (4096, 1024, 512, 4096)),
        (100_000, [PROMPT + "9000"], (9512, 9000, 512, 9512)),
        (3000, [], (3000, 1024, 512, 4096)),
        (500, [], (500, 250, 250, 4096)),
        (500, [PROMPT + "300"], (500, 300, 200, 4096)),
        (500, [PROMPT + "499"], (500, 499, 1, 4096)),
        (500, [COMPLETION + "300"], (500, 200, 300, 4096)),
        (500, [COMPLETION + "499"], (500, 1, 499, 4096)),
        (500, [MODEL + "1000"], (1000, 500, 500, 4096)),
    ],
)
def test_lengths_fit_each_other_and_the_model(
    context: int | None, given: list[str], lengths: tuple[int, int, int, int], tmp_path: Path
) -> None:
    assert _lengths(_configured(tmp_path, context, given)) == lengths


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (PROMPT + "500", "data.max_prompt_tokens + sampling.max_tokens = 1012 exceeds model.max_tokens = 500"),
        (COMPLETION + "500", "data.max_prompt_tokens + sampling.max_tokens = 1524 exceeds model.max_tokens = 500"),
    ],
)
def test_a_length_that_leaves_nothing_is_refused(given: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        _configured(tmp_path, 500, [given])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"n_ctx": 1}, 1),
        ({"max_position_embeddings": 5, "text_config": {"n_positions": 9}}, 9),
        ({"max_position_embeddings": 5, "text_config": 9}, 5),
        ({"max_position_embeddings": 0, "n_positions": 3}, 3),
        ({"max_position_embeddings": "5"}, None),
        ([5], None),
        ("{", None),
    ],
)
def test_the_context_of_a_model_is_read_from_its_configuration(config: Any, context: int | None, tmp_path: Path) -> None:
    assert context_of(_model(tmp_path, config)) == context
    assert context_of(tmp_path / "nowhere") is None
