"""Loads the model's tokenizer, which turns completions into the text that verifiers read."""

from __future__ import annotations

from typing import Any

from services.config import ConfigError, RunConfig


def load_tokenizer(config: RunConfig) -> Any:
    """Return the tokenizer as transformers loads it. Raises `ConfigError`."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(config.model.path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"model.path = {config.model.path!r} has no usable tokenizer: {reason}") from None
