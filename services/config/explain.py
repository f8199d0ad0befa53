"""What `grpo config` prints: the configuration as services will read it, or every key with the docstring that explains it."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import msgspec
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from services.config import RunConfig
from services.config.docstrings import docstrings
from services.config.faults import models_of


@dataclass(frozen=True)
class Key:
    """A key of the configuration."""

    key: str
    type: str
    default: str  # as TOML; empty for a required key
    help: str


def keys() -> list[Key]:
    """Return every key, in the order of the models."""
    return list(_keys(RunConfig, ""))


def as_text() -> str:
    """Return every key with its type, default and meaning, as text."""
    return "\n".join(
        f"{key.key}: {key.type}{f' = {key.default}' if key.default else '  (required)'}\n    {key.help}" for key in keys()
    )


def as_json() -> str:
    """Return the same as a JSON list."""
    return msgspec.json.format(msgspec.json.encode([asdict(key) for key in keys()]), indent=2).decode()


def _keys(model: type[BaseModel], prefix: str) -> Iterator[Key]:
    helps = docstrings(model)
    for name, field in model.model_fields.items():
        models = models_of(field.annotation)
        listed = bool(models) and typing.get_origin(field.annotation) is list
        if not models:
            yield Key(prefix + name, _type(field.annotation), _default(field), helps.get(name, ""))
        place = f"{prefix}{name}{'[]' if listed else ''}"
        if len(models) == 1:
            yield from _keys(models[0], f"{place}.")
        elif models:
            yield from _kinds(models, place)


def _kinds(models: list[type[BaseModel]], place: str) -> Iterator[Key]:
    """Return the keys of a list whose entries have several kinds: each once, with the kinds that have it unless all do."""
    yield Key(
        f"{place}.kind", " | ".join(_type(model.model_fields["kind"].annotation) for model in models), "", "Kind of the entry."
    )
    kinds_of: dict[Key, list[str]] = {}
    for model in models:
        kinds = [str(kind) for kind in typing.get_args(model.model_fields["kind"].annotation)]
        for key in _keys(model, ""):
            if key.key != "kind":
                kinds_of.setdefault(key, []).extend(kinds)
    kind_count = max(map(len, kinds_of.values()))
    for key, kinds in kinds_of.items():
        yield replace(key, key=f"{place}.{key.key}" if len(kinds) == kind_count else f"{place}({', '.join(kinds)}).{key.key}")


def _type(annotation: Any) -> str:
    if typing.get_origin(annotation) is Literal:
        return " | ".join(msgspec.json.encode(value).decode() for value in typing.get_args(annotation))
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return " | ".join(_type(part) for part in typing.get_args(annotation) if part is not types.NoneType)
    if typing.get_origin(annotation) is typing.Annotated:
        return _type(typing.get_args(annotation)[0])
    if isinstance(annotation, types.GenericAlias):
        return f"{annotation.__origin__.__name__}[{', '.join(map(_type, typing.get_args(annotation)))}]"
    return annotation.__name__


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return ""
    if field.default is None:
        return "unset"
    return msgspec.json.encode(field.default).decode()
