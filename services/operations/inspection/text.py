"""Decodes tokens to text, if the model's tokenizer is available.

Guarantees: without a tokenizer it gives the reason instead of text, and tries again later, since the model may still be copied to
its folder. It downloads nothing unless told to.
Waits for: the hub, if it may download. Unblocked by: the limits of its library.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.chat.errors import DataError
from services.operations.inspection.answer import Answer

LOOK_AGAIN_S = 30.0


class TextReader:
    """Decodes tokens with the tokenizer of `model.path`; None: the run's configuration is not available."""

    def __init__(self, model_path: str | None, download: bool = False) -> None:
        """`download`: fetch the tokenizer of a model on the hub that nobody has fetched to this machine."""
        self._model_path, self._download = model_path, download
        self._tokenizer: Any = None
        self._why_not, self._again_s = "", 0.0

    @property
    def why_not(self) -> str:
        """Why there is no text; empty if there is."""
        self._load()
        return self._why_not

    def text(self, tokens: Sequence[int]) -> str | None:
        """Return the text of tokens, including special ones; None without a tokenizer, or for ids outside its vocabulary."""
        tokenizer = self._load()
        if tokenizer is None:
            return None
        if len(tokens) and not 0 <= min(tokens) <= max(tokens) < tokenizer.get_vocab_size():
            return None
        return tokenizer.decode(list(tokens), skip_special_tokens=False)

    def _load(self) -> Any:
        """Return the tokenizer, or None, for the reason in `_why_not`."""
        if self._tokenizer is None and time.monotonic() >= self._again_s:
            self._tokenizer, self._why_not = self._found()
            self._again_s = time.monotonic() + LOOK_AGAIN_S
        return self._tokenizer

    def _found(self) -> tuple[Any, str]:
        if self._model_path is None:
            return None, "the run's folder, which names the model's tokenizer, is not on this machine"
        try:
            from services.chat.tokenizers import read_tokenizer
        except ImportError:
            return None, "the package `tokenizers` is not installed"
        file, why_not = _file(self._model_path, self._download)
        if file is None:
            return None, why_not
        try:
            return read_tokenizer(file), ""
        except DataError as error:
            return None, str(error)


class Passage(Answer):
    """Tokens, as text if the tokenizer is available."""

    tokens: int
    """Number of tokens."""
    text: str | None
    """The decoded text, including special tokens."""
    token_ids: list[int] | None
    """The token ids, if there is no text."""


def read_passage(tokens: list[int], reader: TextReader) -> Passage:
    """Return tokens as text or, without a tokenizer, as ids."""
    text = reader.text(tokens)
    return Passage(tokens=len(tokens), text=text, token_ids=tokens if text is None else None)


def notes_on_text(reader: TextReader) -> list[str]:
    """Return why there is no text; empty if there is."""
    return [f"token ids instead of text: {reader.why_not}"] if reader.why_not else []


def _file(model_path: str, download: bool) -> tuple[Path | None, str]:
    """Return `tokenizer.json` of a folder or of a Hub model, or why there is none."""
    file = Path(model_path) / "tokenizer.json"
    why_not = f"model.path = {model_path!r} has no tokenizer.json on this machine"
    if file.is_file():
        return file, ""
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError, HTTPError
    except ImportError:
        return None, "the package `huggingface_hub` is not installed" if download else why_not
    try:
        cached = try_to_load_from_cache(model_path, "tokenizer.json")
        if not isinstance(cached, str) and download:
            cached = hf_hub_download(model_path, "tokenizer.json")
    except (HTTPError, HFValidationError, OSError) as error:
        said = " ".join(str(error).split())
        return None, f"the tokenizer of model.path = {model_path!r} cannot be downloaded: {said}" if download else why_not
    return (Path(cached), "") if isinstance(cached, str) else (None, why_not)
