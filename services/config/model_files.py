"""Checks of a model's own files, read as JSON, that can refuse a run before anything is loaded.

Guarantees: torch and transformers are not imported; a missing file passes, since its reader reports it.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any, cast

from services.config import ConfigError, RunConfig

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""`owner/name`, or `name` for a few old models."""
REASON_CHARACTERS = 150
"""Length to which a library's reason is cut: the line that reports an error is cut too, and has to keep the remedy."""


def check_model(config: RunConfig) -> None:
    """Refuse a model that does not exist, does not fit its tokenizer or `trainer.sequence_parallel`, and adapters without peft.

    A hub name is not looked up.
    """
    check_path(config.model.path)
    if config.lora.rank and importlib.util.find_spec("peft") is None:
        raise ConfigError(f"lora.rank = {config.lora.rank} needs peft: pip install 'grpo[trainer]', or set lora.rank = 0")
    folder = Path(config.model.path)
    text = _read(folder / "config.json")
    text = text.get("text_config", text)
    _check_vocabulary(folder, text.get("vocab_size"))
    _check_heads(config, text)


def check_path(path: str) -> None:
    """Refuse a `model.path` that is neither a model's folder nor shaped like a hub name."""
    if not Path(path).is_dir() and (HUB_NAME.fullmatch(path) is None or Path(path).exists()):
        raise ConfigError(
            f"model.path = {path!r} is not a folder (at {Path(path).absolute()}), and cannot be the name of a model on the"
            " hub, which is owner/name: correct the path"
        )
    adapter = Path(path) / "adapter_config.json"
    if adapter.is_file() and not (Path(path) / "config.json").is_file():
        base = _read(adapter).get("base_model_name_or_path") or "its base model"
        raise ConfigError(
            f"model.path = {path!r} is an adapter for {base}, not a whole model: merge them with peft "
            "(AutoPeftModelForCausalLM.from_pretrained(PATH).merge_and_unload().save_pretrained(MERGED)), save the tokenizer "
            "there, too, and set model.path to that folder"
        )


def unusable(path: str, what: str, error: Exception) -> ConfigError:
    """Return the error for a model that a library cannot load. `what`: its description, e.g. "has no usable tokenizer"."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if len(reason) > REASON_CHARACTERS:
        reason = f"{reason[: REASON_CHARACTERS - 1]}…"
    remedy = "save the whole model there, with its tokenizer"
    if not Path(path).is_dir():
        remedy = "correct the path to a folder, or the name (a private or gated model needs HF_TOKEN)"
    return ConfigError(f"model.path = {path!r} {what}: {reason}; {remedy}")


def largest_token_id(folder: Path) -> int:
    """Return the largest id in the tokenizer of `folder`, or -1 if its `tokenizer.json` has none."""
    tree = _read(folder / "tokenizer.json")
    vocabulary: list[Any] | dict[str, int] = tree.get("model", {}).get("vocab", {})
    added = cast("list[dict[str, Any]]", tree.get("added_tokens") or [])
    # A unigram model lists its tokens in the order of their ids; others map tokens to ids.
    ids = [len(vocabulary) - 1] if isinstance(vocabulary, list) else list(vocabulary.values())
    return max(ids + [token["id"] for token in added], default=-1)


def _check_vocabulary(folder: Path, size: int | None) -> None:
    largest = largest_token_id(folder)
    if size is not None and largest >= size:
        raise ConfigError(
            f"model.path = {str(folder)!r}: its tokenizer gives token ids up to {largest}, but config.json has vocab_size = "
            f"{size}: use the tokenizer that the model was trained with, or enlarge the model's embedding"
        )


def _check_heads(config: RunConfig, text: dict[str, Any]) -> None:
    width, heads = config.trainer.sequence_parallel, text.get("num_attention_heads")
    if width == 1 or heads is None:
        return
    shared = text.get("num_key_value_heads") or heads
    if heads % width or (shared % width and width % shared):
        raise ConfigError(
            f"trainer.sequence_parallel = {width} cannot divide the {heads} attention heads and {shared} key/value heads of "
            f"model.path = {config.model.path!r}: set a divisor of both"
        )


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model.path: {file} is not valid JSON: {error}") from None
