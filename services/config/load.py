"""Reading a configuration: TOML file < environment (GRPO__SECTION__KEY) < command line (section.key=value).

Guarantees: every error is one `ConfigError` line that names the key, the value and the remedy; an unknown key from any
of the three places is refused with the nearest valid name.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel, ValidationError

from services.config.consistency import check
from services.config.generation import Generator
from services.config.root import Redis, RunConfig
from services.config.training import Trainer
from services.config.unused_keys import unread

ENV_PREFIX = "GRPO__"
SOURCE_KINDS = ("jsonl", "parquet", "reasoning_gym")
REPLACED = {
    "data.source": "is a list now, data.sources: write [[data.sources]] for [data.source], sources = [{ ... }] for source = "
    "{ ... }, data.sources.0.KEY for data.source.KEY",
}
"""Keys of older versions, with what stands for them."""


class ConfigError(ValueError):
    """A configuration that cannot be used: the message names the key, the value and the remedy."""


Before = Callable[[RunConfig], RunConfig | None]
"""Finds the configuration under which a run was begun, if it was: what nothing read there may stay as it is."""


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    before: Before = lambda config: None,
) -> RunConfig:
    """Read `path`, lay the environment and `section.key=value` overrides over it, and validate."""
    tree = _read(Path(path))
    for name, text in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(ENV_PREFIX):
            _assign(tree, name[len(ENV_PREFIX) :].lower().split("__"), text, origin=f"environment variable {name}")
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"override {override!r} is not of the form section.key=value")
        _assign(tree, key.strip().split("."), text, origin=f"command line {key.strip()}")
    return validate(tree, str(path), before)


def load_resolved(path: str | Path) -> RunConfig:
    """Read a configuration that `to_toml` wrote; the environment and the command line have no say.

    Keys that nothing reads are taken: the version that wrote it may have taken them too, and its run is to be seen and to go on.
    """
    return validate(_read(Path(path)), str(path), before=lambda config: config)


def validate(tree: Mapping[str, Any], origin: str, before: Before = lambda config: None) -> RunConfig:
    """Turn a tree of values into a `RunConfig`, or raise a `ConfigError` of one line: for all unknown keys and impossible values,
    else for all keys that nothing reads, else for the first rule that is broken."""
    try:
        config = RunConfig.model_validate(tree)
        _refuse_unread(config, before)
        check(config)
    except ValidationError as error:
        faults = [_explain(fault) for fault in error.errors(include_url=False)]
        raise ConfigError(f"{origin}: " + "; ".join(faults)) from None
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}") from None
    return config


def to_toml(config: RunConfig) -> str:
    """The complete configuration as TOML; reading it back gives an equal `RunConfig`."""
    return msgspec.toml.encode(config.model_dump(mode="json")).decode()


CARRIED_OUT: dict[str, Any] = {
    "api": True, "web": True, "tracking": True, "tracing": True, "sync": True, "checkpoint": True, "fleet": True,
    "run": {"dir"},
    "redis": set(Redis.model_fields) - {"payload_shards"},
    "generator": set(Generator.model_fields) - {"engine", "engine_options"},
    "trainer": set(Trainer.model_fields) - {"mini_batches", "deterministic"},
}  # fmt: skip
"""Keys that say how a run is carried out, and where; they may differ when it is taken up again."""


def digest(config: RunConfig) -> str:
    """SHA-256 (16 hex digits) of what the run is; how it is carried out does not count."""
    tree = config.model_dump(mode="json", exclude=CARRIED_OUT)
    if not config.redis.payload_shards:  # runs that began before there was such a key go on
        del tree["redis"]
    return hashlib.sha256(msgspec.json.encode(tree, order="sorted")).hexdigest()[:16]


def _refuse_unread(config: RunConfig, before: Before) -> None:
    if (found := list(unread(config))) and (begun := before(config)):
        known = set(unread(begun))
        found = [line for line in found if line not in known]
    if found:
        raise ValueError("; ".join(found))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"configuration file {path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} is not valid TOML: {error}") from None


def _assign(tree: dict[str, Any], parts: list[str], text: str, origin: str) -> None:
    node: Any = tree
    for part in parts[:-1]:
        node = node.setdefault(part, {}) if isinstance(node, dict) else _item(node, part, origin)
    if isinstance(node, dict):
        node[parts[-1]] = _value(text)
    else:
        raise ConfigError(f"{origin}: {'.'.join(parts[:-1])} is not a section")


def _item(node: Any, part: str, origin: str) -> Any:
    if isinstance(node, list) and part.isdigit() and int(part) < len(node):
        return node[int(part)]
    raise ConfigError(f"{origin}: {part!r} does not name a section or an entry")


def _value(text: str) -> Any:
    """A TOML value if it reads as one, else the text itself, so that strings need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(fault: Any) -> str:
    path = [str(part) for part in fault["loc"]]
    location = [part for part in path if part not in SOURCE_KINDS]
    key = ".".join(location) or "configuration"
    if fault["type"] == "extra_forbidden" and key in REPLACED:
        return f"{key} {REPLACED[key]}"
    if fault["type"] == "extra_forbidden":
        names = _valid_names(path[:-1])
        near = difflib.get_close_matches(location[-1], names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(names)}"
        return f"{key} = {fault['input']!r} is not a known key; {hint}"
    if fault["type"] == "missing":
        return f"{key} is required; add it"
    message = fault["msg"].removeprefix("Value error, ")
    if not location:
        return message
    return f"{key} = {fault['input']!r}: {message[0].lower()}{message[1:]}"


def _valid_names(location: Sequence[str]) -> list[str]:
    models: list[type[BaseModel]] = [RunConfig]
    for part in location:
        if part in SOURCE_KINDS:  # pydantic names the branch of the union it took
            models = [model for model in models if part in typing.get_args(model.model_fields["kind"].annotation)]
        elif not part.isdigit():
            models = [m for model in models if part in model.model_fields for m in _models(model.model_fields[part].annotation)]
    return sorted({name for model in models for name in model.model_fields})


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The section classes an annotation names, through unions, lists and Annotated."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in _models(part)]
