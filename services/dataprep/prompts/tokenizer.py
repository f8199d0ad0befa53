"""Prompts to token ids without torch: `tokenizer.json` through the tokenizers library, the chat template through jinja2.

Guarantees: the same ids as the model's own tokenizer gives for the same messages; a template runs sandboxed and sees no
clock, so that a prompt is the same on every day (templates that print a date have a variable to set it by, see
`data.chat_template_options`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from tokenizers import Tokenizer

from services.config.data import Data
from services.dataprep.prompts.errors import DataError
from services.dataprep.prompts.rows import PromptRow

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
PLACEHOLDER = "{prompt}"


class PromptTokenizer:
    """Turns rows into token ids as `data` says, with the tokenizer of the model in folder `folder`."""

    def __init__(self, folder: Path, data: Data) -> None:
        self._data = data
        if PLACEHOLDER not in data.user_template:
            raise DataError(f"data.user_template = {data.user_template!r} has no {PLACEHOLDER}: say where the question goes")
        self._tokenizer = _load_tokenizer(folder)
        self._template, self._variables = _load_template(folder, data) if data.chat_template else (None, {})

    def encode(self, rows: Sequence[PromptRow]) -> list[list[int]]:
        """Token ids of each row's prompt. A rendered template brings its own special tokens; bare text gets the tokenizer's."""
        texts = [self._text(row) for row in rows]
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=self._template is None)]

    def _text(self, row: PromptRow) -> str:
        if self._template is None:
            if not isinstance(row.prompt, str):
                raise DataError(f"{row.where}: a list of messages needs data.chat_template = true, or a prompt that is a string")
            return self._data.user_template.replace(PLACEHOLDER, row.prompt)
        try:
            return self._template.render(messages=self._messages(row), **self._variables)
        except (jinja2.TemplateError, TypeError) as error:
            raise DataError(f"{row.where}: the chat template refuses the prompt: {error}") from None

    def _messages(self, row: PromptRow) -> list[dict[str, Any]]:
        if not isinstance(row.prompt, str):
            return row.prompt
        system = [{"role": "system", "content": self._data.system_prompt}] if self._data.system_prompt else []
        return [*system, {"role": "user", "content": self._data.user_template.replace(PLACEHOLDER, row.prompt)}]


def tokenizer_folder(path: str) -> Path:
    """The folder of `model.path`; of a hub name, the folder its tokenizer files are downloaded to."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=["tokenizer*.json", "special_tokens_map.json", "chat_template*"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"model.path = {path!r} is neither a folder nor a model that the hub gives out: {reason}") from None


def _load_tokenizer(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise DataError(f"model.path: {file} does not exist: save the model with its fast tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
        raise DataError(f"model.path: {file} is not a tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _load_template(folder: Path, data: Data) -> tuple[jinja2.Template, dict[str, Any]]:
    """The compiled chat template and its variables beside the messages."""
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
        raise DataError(f"model.path: the chat template in {folder} cannot be read: {error}") from None
    fixed = {"add_generation_prompt": True, "tools": None, "documents": None}
    return template, {**special, **fixed, **data.chat_template_options}


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    """Where templates are found, newest convention first: a file of its own, then the tokenizer's configuration."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = _json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(source, list):  # several by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return source


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Templates are written for these settings and helpers, those of transformers."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    return environment


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training on chats; here it is just text."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        """The nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)  # jinja2's own escapes HTML


def _token_text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"model.path: {path} is not JSON: {error}") from None
