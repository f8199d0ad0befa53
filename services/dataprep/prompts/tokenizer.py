"""Turns prompts into token ids without torch: `tokenizer.json` through the tokenizers library, the chat template through jinja2.

Guarantees: the ids equal those of the model's own tokenizer for the same messages; a template runs sandboxed and has no
clock, so that a prompt is the same on any day (templates that print a date have a variable to set it with, see
`data.chat_template_options`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from tokenizers import Tokenizer

from services.config import ConfigError
from services.config.data import Data
from services.config.model_files import check_path
from services.dataprep.prompts.errors import DataError
from services.dataprep.prompts.rows import PromptRow

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
PLACEHOLDER = "{prompt}"


class PromptTokenizer:
    """Turns rows into token ids as `data` specifies, with the tokenizer of the model in `folder`."""

    def __init__(self, folder: Path, data: Data) -> None:
        self._data = data
        if PLACEHOLDER not in data.user_template:
            raise DataError(f"data.user_template = {data.user_template!r} has no {PLACEHOLDER}: add it where the question goes")
        self._tokenizer = _load_tokenizer(folder)
        self._template, self._variables = _load_template(folder, data) if data.chat_template else (None, {})

    def encode(self, rows: Sequence[PromptRow]) -> list[list[int]]:
        """Encode each row's prompt. Plain text gets the tokenizer's special tokens; templates bring their own."""
        texts = [self._text(row) for row in rows]
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=self._template is None)]

    def _text(self, row: PromptRow) -> str:
        if self._template is None:
            if not isinstance(row.prompt, str):
                raise DataError(f"{row.where}: a list of messages needs data.chat_template = true: set it, or use a string")
            return self._data.user_template.replace(PLACEHOLDER, row.prompt)
        try:
            return self._template.render(messages=messages_of(row, self._data), **self._variables)
        except (jinja2.TemplateError, TypeError) as error:
            raise DataError(f"{row.where}: the chat template rejects the prompt: {error}") from None

    def completions(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts as if a model had sampled them, without special tokens."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


def messages_of(row: PromptRow, data: Data) -> list[dict[str, Any]]:
    """Return the prompt of a row as chat messages."""
    if not isinstance(row.prompt, str):
        return row.prompt
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return [*system, {"role": "user", "content": data.user_template.replace(PLACEHOLDER, row.prompt)}]


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
        return Path(snapshot_download(path, allow_patterns=["tokenizer*.json", "special_tokens_map.json", "chat_template*"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"model.path = {path!r} is neither a folder nor a model available on the hub: {reason}") from None


def _load_tokenizer(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise DataError(f"model.path: {file} does not exist: save the model with its fast tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for any fault of the file
        raise DataError(f"model.path: {file} is not a valid tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _load_template(folder: Path, data: Data) -> tuple[jinja2.Template, dict[str, Any]]:
    """Return the compiled chat template and its variables other than the messages."""
    config = _json(folder / "tokenizer_config.json")
    source = _template_source(folder, config)
    if source is None:
        raise DataError(
            f"model.path: the tokenizer in {folder} has no chat template: set data.chat_template = false, "
            "or add the file chat_template.jinja"
        )
    tokens = _json(folder / "special_tokens_map.json") | config
    special = {name: _token_text(tokens[name]) for name in SPECIAL_TOKENS if tokens.get(name)}
    try:
        template = _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise DataError(f"model.path: the chat template in {folder} is invalid: {error}") from None
    fixed = {"add_generation_prompt": True, "tools": None, "documents": None}
    return template, {**special, **fixed, **data.chat_template_options}


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    """Return the source of the chat template, newest convention first: its own file, then the tokenizer's configuration."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source: str | list[dict[str, str]] | None = _json(folder / "chat_template.json").get("chat_template")
    source = source or config.get("chat_template")
    if isinstance(source, list):  # several by name
        return {entry["name"]: entry["template"] for entry in source}.get("default")
    return source


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return an environment with the settings and helpers of transformers, for which templates are written."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
    )
    cast("Any", environment).filters["tojson"] = _tojson
    cast("Any", environment).globals["raise_exception"] = _raise
    return environment


class GenerationBlock(jinja2.ext.Extension):
    """Handles `{% generation %}…{% endgeneration %}`, which marks assistant text for training; here it is plain text."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        """Return the nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)  # jinja2's own filter escapes HTML


def _token_text(token: str | dict[str, str]) -> str:
    return token["content"] if isinstance(token, dict) else token


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"model.path: {path} is not valid JSON: {error}") from None
