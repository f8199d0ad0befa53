"""Tokens as text, where the model's tokenizer is at hand.

Guarantees: nothing is downloaded; without a tokenizer there is no text, and a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any


class TextReader:
    """Reads tokens with the tokenizer of `model.path`; None: the run's configuration is not at hand."""

    def __init__(self, model_path: str | None) -> None:
        self._model_path = model_path

    @property
    def why_not(self) -> str:
        """Why there is no text, or empty."""
        return self._loaded[1]

    def text(self, tokens: Sequence[int]) -> str | None:
        """The text of tokens, special ones included; None without a tokenizer, and for tokens that are none of its."""
        tokenizer = self._loaded[0]
        if tokenizer is None or (len(tokens) and not 0 <= min(tokens) <= max(tokens) < tokenizer.get_vocab_size()):
            return None
        return tokenizer.decode(list(tokens), skip_special_tokens=False)

    @cached_property
    def _loaded(self) -> tuple[Any, str]:
        if self._model_path is None:
            return None, "the run's folder is not here, and with it the model's tokenizer"
        try:
            from tokenizers import Tokenizer
        except ImportError:
            return None, "the package `tokenizers` is not installed"
        file = _file(self._model_path)
        if file is None:
            return None, f"model.path = {self._model_path!r} has no tokenizer.json on this machine"
        try:
            return Tokenizer.from_file(str(file)), ""
        except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
            return None, f"{file} is not a tokenizer: {error}"


def _file(model_path: str) -> Path | None:
    """`tokenizer.json` of a folder, or of a hub name whose files were downloaded before."""
    file = Path(model_path) / "tokenizer.json"
    if file.is_file():
        return file
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        cached = try_to_load_from_cache(model_path, "tokenizer.json")
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None
