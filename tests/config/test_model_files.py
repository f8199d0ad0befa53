"""A model's folder is checked by means of its files before anything is loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from services.config import ConfigError, RunConfig
from services.config.load import validate
from services.config.model_files import check_model, check_path, largest_token_id

TOKENS = {"a": 0, "b": 1, "c": 7}
CONFIG = {"vocab_size": 10, "num_attention_heads": 8, "num_key_value_heads": 2}


def _write(folder: Path, config: dict[str, Any], vocabulary: Any, added: list[int] | None = None) -> RunConfig:
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": added and [{"id": number, "content": "x"} for number in added]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return _config(folder)


def _config(folder: Path, width: int = 1) -> RunConfig:
    tree: dict[str, Any] = {
        "model": {"path": str(folder)},
        "data": {"sources": [{"kind": "jsonl", "path": "unused.jsonl"}]},
        "verifiers": [{"kind": "math"}],
        "trainer": {"ranks": width, "sequence_parallel": width},
    }
    return validate(tree, origin="test")


@pytest.mark.parametrize(
    ("vocabulary", "added", "largest"),
    [(TOKENS, None, 7), (TOKENS, [9, 4], 9), ([["a", 0.0], ["b", -1.0]], [], 1), ({}, None, -1)],
)
def test_the_largest_token_id_is_found(vocabulary: Any, added: list[int] | None, largest: int, tmp_path: Path) -> None:
    _write(tmp_path, CONFIG, vocabulary, added)
    assert largest_token_id(tmp_path) == largest


@pytest.mark.parametrize("config", [CONFIG, {"text_config": CONFIG}])
def test_a_vocabulary_that_is_too_small_is_rejected(config: dict[str, Any], tmp_path: Path) -> None:
    check_model(_write(tmp_path, config, TOKENS, [9]))
    with pytest.raises(ConfigError, match=r"model\.path = .* token ids up to 10, but config\.json has vocab_size = 10: use the"):
        check_model(_write(tmp_path, config, TOKENS, [10]))


@pytest.mark.parametrize(("width", "fits"), [(1, True), (2, True), (4, True), (3, False), (16, False)])
def test_sequence_parallelism_must_divide_the_heads(width: int, fits: bool, tmp_path: Path) -> None:
    _write(tmp_path, CONFIG, TOKENS)
    if fits:
        check_model(_config(tmp_path, width))
    else:
        with pytest.raises(ConfigError, match=rf"trainer\.sequence_parallel = {width} cannot divide the 8 attention heads"):
            check_model(_config(tmp_path, width))


def test_adapters_need_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(tmp_path)
    adapted = config.model_copy(update={"lora": config.lora.model_copy(update={"rank": 8})})
    check_model(adapted)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"lora\.rank = 8 needs peft: pip install 'grpo\[trainer\]'"):
        check_model(adapted)
    check_model(config)


def test_missing_files_are_not_checked(tmp_path: Path) -> None:
    check_model(_config(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        check_model(_config(tmp_path))


@pytest.mark.parametrize("path", ["/nowhere/model", "./model", "runs/a/model", "~/model", "a b"])
def test_a_missing_path_is_not_taken_for_a_hub_name(path: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a folder .* cannot be the name of a model on the hub"):
        check_path(path)


@pytest.mark.parametrize("path", ["gpt2", "Qwen/Qwen3-0.6B"])
def test_a_hub_name_is_accepted(path: str) -> None:
    check_path(path)  # raises otherwise


def test_an_adapter_is_refused_with_the_way_to_merge_it(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-0.6B"}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"is an adapter for Qwen/Qwen3-0\.6B, not a whole model: merge them with peft"):
        check_path(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    check_path(str(tmp_path))
