"""Loads the model's tokenizer, which turns completions into the text that verifiers read."""

from __future__ import annotations

from typing import Any

from services.config import RunConfig
from services.config.model_files import check_path, unusable


def load_tokenizer(config: RunConfig) -> Any:
    """Return the tokenizer as transformers loads it. Raises `ConfigError`."""
    check_path(config.model.path)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(config.model.path)
    except (OSError, ValueError) as error:
        raise unusable(config.model.path, "has no usable tokenizer", error) from None
