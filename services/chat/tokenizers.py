"""Tokenizers of models: `tokenizer.json` through the tokenizers library, from a folder or downloaded from the hub."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from services.chat.errors import DataError
from services.chat.templates import FOLDER
from services.config import ConfigError
from services.config.model_files import check_path, unusable

FILES = ["tokenizer*.json", "special_tokens_map.json", "chat_template*", f"{FOLDER}/*"]


def tokenizer_folder(path: str) -> Path:
    """Return the folder of `model.path`; for a hub name, the folder to which its tokenizer files are downloaded."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    try:
        check_path(path)
    except ConfigError as error:
        raise DataError(str(error)) from None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise DataError(str(unusable(path, "is neither a folder nor a model available on the hub", error))) from None


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of the model in `folder`, without truncation and padding. Raises `DataError`."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise DataError(f"model.path: {file} does not exist: save the model with its fast tokenizer")
    tokenizer = read_tokenizer(file, "model.path: ")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_tokenizer(file: Path, key: str = "") -> Tokenizer:
    """Return the tokenizer in a file. Raises `DataError`, with `key` before the file's name."""
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for any fault of the file
        raise DataError(f"{key}{file} is not a valid tokenizer: {error}") from None
