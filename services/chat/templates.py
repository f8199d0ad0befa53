"""Chat templates of models, rendered by jinja2.

Guarantees: a template renders as it does in transformers, except that it runs sandboxed and its clock, `strftime_now`, stands
still, so that a prompt is the same on any day: at `data.chat_template_options.date`, or else at `DATE`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from services.chat.errors import DataError
from services.config.data import Data

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


DEFAULT = "default"  # name of the template that is used unless another is named
DATE = "2026-01-01"
"""The date that templates print unless a run sets another. It never changes, since it would change every prompt."""
CLOCK = "strftime_now"
TOOL_FORMAT, TOOL_FORMAT_KEY = "tool_format", "data.chat_template_options.tool_format"
"""The option that names the notation of tool calls (format.py), for templates in which it does not show."""
SUPPLIED = {"messages", "tools", "documents", "add_generation_prompt", *SPECIAL_TOKENS}
"""Names that a template reads without an option."""
FOLDER = "additional_chat_templates"  # where transformers keeps those with other names


class TemplateRejection(ValueError):
    """The template cannot render these messages, for the reason that it gives."""


def chat_template(folder: Path, data: Data) -> ChatTemplate | None:
    """Return the chat template that a run uses for the model in `folder`, or None if it uses none. Raises `DataError`."""
    if data.chat_template is False:
        return None
    return ChatTemplate(folder, data.chat_template_options, data.chat_template if isinstance(data.chat_template, str) else "")


class ChatTemplate:
    """A chat template for the model in `folder`, with `options` as further variables. Raises `DataError`."""

    def __init__(self, folder: Path, options: Mapping[str, Any], given: str = "") -> None:
        """`given`: the template's text, or its name among those of the tokenizer; empty: the tokenizer's default."""
        config = _json(folder / "tokenizer_config.json")
        self.source = given if is_template(given) else _named(folder, config, given)
        tokens = _json(folder / "special_tokens_map.json") | config
        special = {name: _token_text(tokens[name]) for name in SPECIAL_TOKENS if tokens.get(name)}
        clock = CLOCK in self.source
        environment = _environment(options.get("date", DATE) if clock else DATE)
        try:
            parsed = environment.parse(self.source)
            read = jinja2.meta.find_undeclared_variables(parsed)
            self._template = environment.from_string(parsed)
        except jinja2.TemplateError as error:
            which = "data.chat_template" if given else f"model.path: the chat template in {folder}"
            raise DataError(f"{which} is invalid: {error}") from None
        _check_options(options, read | {"date"} if clock else read)
        self._variables: dict[str, Any] = {**special, "add_generation_prompt": True, "tools": None, "documents": None, **options}

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *, generation: bool = True
    ) -> str:
        """Return the text of a conversation, by default up to where the assistant's next message begins.

        Raises `TemplateRejection`.
        """
        variables = dict(self._variables)
        if tools:
            variables["tools"] = tools
        if not generation:
            variables["add_generation_prompt"] = False
        try:
            return self._template.render(messages=messages, **variables)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            raise TemplateRejection(str(error)) from None


def is_template(text: str) -> bool:
    """Return whether a text is a template, and not the name or the path of one."""
    return "{" in text


def _named(folder: Path, config: dict[str, Any], name: str) -> str:
    """Return the tokenizer's template of that name; "": its default one."""
    found = _templates(folder, config)
    if source := found.get(name or DEFAULT):
        return source
    if name:
        known = f"it has {', '.join(sorted(found))}" if found else "it has none"
        raise DataError(
            f"data.chat_template = {name!r}: the tokenizer in {folder} has no chat template of that name; {known}. To use a "
            "file, give a path that ends with .jinja"
        )
    raise DataError(
        f"model.path: the tokenizer in {folder} has no chat template: set data.chat_template to the path of one, or to false"
    )


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the tokenizer's templates by name, newest convention last: those of its configuration, then separate files."""
    found: dict[str, str] = {}
    for source in (config.get("chat_template"), _json(folder / "chat_template.json").get("chat_template")):
        if isinstance(source, str):
            found[DEFAULT] = source
        elif source:
            found |= {entry["name"]: entry["template"] for entry in cast("list[dict[str, str]]", source)}
    for file in sorted((folder / FOLDER).glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        found[DEFAULT] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return found


def _check_options(options: Mapping[str, Any], read: set[str]) -> None:
    """Refuse options that the template does not read."""
    if unread := sorted(set(options) - read - {TOOL_FORMAT}):
        names = ", ".join(sorted(read - SUPPLIED)) or "none"
        raise DataError(
            f"data.chat_template_options.{unread[0]} = {options[unread[0]]!r} has no effect: the chat template does not read it. "
            f"It reads these options: {names}"
        )


def _environment(date: object) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return an environment with the settings and helpers of transformers, for which templates are written."""
    try:
        now = datetime.strptime(str(date), "%Y-%m-%d")
    except ValueError:
        raise DataError(f"data.chat_template_options.date = {date!r} is not a date: write it as {DATE}") from None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
    )
    cast("Any", environment).filters["tojson"] = _tojson
    cast("Any", environment).globals.update({"raise_exception": _raise, CLOCK: now.strftime})
    return environment


class GenerationBlock(jinja2.ext.Extension):
    """Handles `{% generation %}…{% endgeneration %}`, which marks assistant text for training; here it is plain text."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        """Return the nodes between the tags, whose variables end there."""
        line = next(parser.stream).lineno
        return [jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)]


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
