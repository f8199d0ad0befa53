"""Load a configuration. Precedence: TOML file < environment (GRPO__SECTION__KEY) < command line (section.key=value).

Guarantees: every error is a one-line `ConfigError` that names the key, the value and the remedy; an unknown key from any
of the three sources is refused, and the message suggests the nearest valid name.
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
from typing import Any, cast

import msgspec
from pydantic import BaseModel, ValidationError

from services.config.consistency import check
from services.config.generation import Generator
from services.config.loss import settle
from services.config.root import Redis, RunConfig
from services.config.training import Trainer
from services.config.unused_keys import unread

ENV_PREFIX = "GRPO__"
KINDS = ("jsonl", "parquet", "reasoning_gym", "math", "exact", "regex", "length", "python", "http", "judge")
"""Of prompt sources and verifiers: pydantic puts them into the path of a faulty key."""
REPLACED = {
    "data.source": "is now a list, data.sources: write [[data.sources]] for [data.source], sources = [{ ... }] for source = "
    "{ ... }, data.sources.0.KEY for data.source.KEY",
    "generator.max_expiries": "is gone, and 16 leases of a ticket may expire: remove the key",
    "generator.gpu_memory_utilization": "is an engine option of vLLM now: set generator.engine_options.gpu_memory_utilization",
    "generator.partial_every_s": "is gone, and unfinished completions are saved every 5 s: remove the key",
    "replay.error_buffer": "is gone, and the smallest buffer that never blocks a run is used: remove the key",
    "replay.payload_ttl_s": "is gone, and payloads without a header expire after an hour: remove the key",
    "filters.active_sampling": "is gone: remove the key, or set filters.active_sampling_bound = 0 for false",
    "optimizer.beta1": "is gone: set optimizer.betas = [BETA1, BETA2]",
    "optimizer.beta2": "is gone: set optimizer.betas = [BETA1, BETA2]",
    "trainer.logprob_chunk_tokens": "is gone, and logits are computed for 1024 tokens at a time: remove the key",
    "fleet.heartbeat_s": "is gone, and is a tenth of fleet.ttl_s: remove the key",
    "tracking.wandb_mode": "is gone: remove the key, and set the environment variable WANDB_MODE = online for online",
    "sync.bucket_mib": "is gone, and buckets have 32 MiB: remove the key",
    "evaluation.final_s": "is gone, and the last round may take 10 minutes: remove the key",
}
"""Keys of older versions, and what to do instead."""


class ConfigError(ValueError):
    """A configuration that cannot be used. The message names the key, the value and the remedy."""


Before = Callable[[RunConfig], RunConfig | None]
"""Returns the configuration that a run began with, or None if it has not begun; unused keys set there are accepted."""


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    before: Before = lambda config: None,
) -> RunConfig:
    """Read `path`, apply the environment and then the `section.key=value` overrides, and validate."""
    tree = _read(Path(path))
    for name, text in sorted((os.environ if environ is None else environ).items()):
        _refuse_lookalike(name)
        if name.startswith(ENV_PREFIX):
            _assign(tree, name[len(ENV_PREFIX) :].lower().split("__"), text, origin=f"environment variable {name}")
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"override {override!r} is not of the form section.key=value")
        _assign(tree, key.strip().split("."), text, origin=f"command line {key.strip()}")
    _place_functions(tree, Path(path).absolute().parent)
    return validate(tree, str(path), before)


def load_resolved(path: str | Path) -> RunConfig:
    """Read a configuration that `to_toml` wrote, ignoring the environment and the command line.

    Accept unused keys: the version that wrote the file may have accepted them, and its run must stay readable and resumable.
    """
    return validate(_read(Path(path)), str(path), before=lambda config: config)


def validate(tree: Mapping[str, Any], origin: str, before: Before = lambda config: None) -> RunConfig:
    """Turn a tree of values into a `RunConfig`, or raise a one-line `ConfigError`.

    The error lists all unknown keys and invalid values; if there are none, all unused keys; if there are none of these either,
    the first broken rule.
    """
    try:
        config = _settled(RunConfig.model_validate(tree))
        _refuse_unread(config, before)
        check(config)
    except ValidationError as error:
        faults = [_explain(fault) for fault in error.errors(include_url=False)]
        raise ConfigError(f"{origin}: " + "; ".join(faults)) from None
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}") from None
    return config


def _settled(config: RunConfig) -> RunConfig:
    """Return the configuration with defaults that depend on several sections replaced by what they mean."""
    loss = settle(config.loss, config.admission.max_staleness, config.trainer.mini_batches)
    return config.model_copy(update={"loss": loss})


def to_toml(config: RunConfig) -> str:
    """Return the complete configuration as TOML; reading it back gives an equal `RunConfig`."""
    return msgspec.toml.encode(config.model_dump(mode="json", exclude_none=True)).decode()


CARRIED_OUT: dict[str, Any] = {
    "api": True, "web": True, "tracking": True, "tracing": True, "sync": True, "checkpoint": True, "fleet": True,
    "run": {"dir"},
    "redis": set(Redis.model_fields) - {"payload_shards"},
    "loss": {"correction_max_gap"},
    "generator": {
        **dict.fromkeys(Generator.model_fields.keys() - {"engine", "engine_options"}, True),
        "engine_options": {"gpu_memory_utilization"},
    },
    "trainer": set(Trainer.model_fields) - {"mini_batches", "deterministic"},
}  # fmt: skip
"""Keys that say how and where a run is executed. They may change when it is resumed."""

CHANGEABLE: dict[str, Any] = {"run": {"steps"}, "optimizer": True, "filters": True, "evaluation": True}
"""Keys that say how a run goes on. They may change when it is resumed, which is recorded: from there on it is another course."""
NOT_DEFINING = {**CARRIED_OUT, **CHANGEABLE, "run": CARRIED_OUT["run"] | CHANGEABLE["run"]}


def digest(config: RunConfig) -> str:
    """Return the SHA-256 (16 hex digits) of the keys that define the run, without those of `CARRIED_OUT` and `CHANGEABLE`.

    For a verifier's `path.py:name` the content of the file counts, not its folder. Raises `ConfigError` if it cannot be read.
    """
    tree = config.model_dump(mode="json", exclude=NOT_DEFINING)
    for verifier, described in zip(config.verifiers, tree["verifiers"], strict=True):
        if verifier.kind == "python" and verifier.file:
            described["function"] = [Path(verifier.file).name, verifier.function.rpartition(":")[2], code_digest(verifier.file)]
    if not config.redis.payload_shards:  # keeps the digest of runs that are older than this key
        del tree["redis"]
    return hashlib.sha256(msgspec.json.encode(tree, order="sorted")).hexdigest()[:16]


def code_digest(path: str) -> str:
    """Return the SHA-256 of a file of code. Raises `ConfigError` if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(
            f"the file of a verifier's function, {path}, cannot be read ({error.strerror}): correct the path"
        ) from None


def _refuse_lookalike(name: str) -> None:
    """Refuse an environment variable that is meant for a key but is not read, such as GRPO_RUN_STEPS."""
    section, _, key = name.removeprefix("GRPO_").lower().partition("_")
    if not name.startswith("GRPO_") or name.startswith(ENV_PREFIX) or section not in RunConfig.model_fields:
        return
    fields = [field for model in _models(RunConfig.model_fields[section].annotation) for field in model.model_fields]
    if near := difflib.get_close_matches(key, fields, n=1, cutoff=0.85):
        meant = f"{ENV_PREFIX}{section}__{near[0]}".upper()
        raise ConfigError(f"environment variable {name} is not read: did you mean {meant}? Rename or unset it")


def _place_functions(tree: dict[str, Any], folder: Path) -> None:
    """Make the paths of verifiers' functions absolute; relative ones start at the configuration file's folder."""
    verifiers = tree.get("verifiers")
    for verifier in cast("list[Any]", verifiers) if isinstance(verifiers, list) else ():
        table = _table(verifier)
        function = table.get("function") if table else None
        if table and isinstance(function, str) and function.rpartition(":")[0].endswith(".py"):
            place, _, name = function.rpartition(":")
            table["function"] = f"{folder / Path(place).expanduser()}:{name}"


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
    node: object = tree
    for part in parts[:-1]:
        table = _table(node)
        node = _item(node, part, origin) if table is None else table.setdefault(part, {})
    if (table := _table(node)) is None:
        raise ConfigError(f"{origin}: {'.'.join(parts[:-1])} is not a section")
    table[parts[-1]] = _value(text)


def _table(node: object) -> dict[str, Any] | None:
    return cast("dict[str, Any]", node) if isinstance(node, dict) else None


def _item(node: Any, part: str, origin: str) -> Any:
    if isinstance(node, list) and part.isdigit() and int(part) < len(entries := cast("list[Any]", node)):
        return entries[int(part)]
    raise ConfigError(f"{origin}: {part!r} does not name a section or an entry")


def _value(text: str) -> Any:
    """Parse a TOML value; return text that is not one unchanged, so that strings need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(fault: Any) -> str:
    path = [str(part) for part in fault["loc"]]
    location = [part for part in path if part not in KINDS]
    key = ".".join(location) or "configuration"
    if fault["type"] == "extra_forbidden" and key in REPLACED:
        return f"{key} {REPLACED[key]}"
    if fault["type"] == "extra_forbidden":
        names = _valid_names(path[:-1])
        near = difflib.get_close_matches(location[-1], names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(names)}"
        return f"{key} = {fault['input']!r} is not a known key; {hint}"
    if fault["type"] == "missing":
        return _missing(key)
    message = fault["msg"].removeprefix("Value error, ")
    if not location:
        return message
    return f"{key} = {fault['input']!r}: {message[0].lower()}{message[1:]}"


def _missing(key: str) -> str:
    if "." in key:
        return f"missing required key {key}"
    listed = typing.get_origin(RunConfig.model_fields[key].annotation) is list
    return f"missing required section {f'[[{key}]]' if listed else f'[{key}]'}"


def _valid_names(location: Sequence[str]) -> list[str]:
    models: list[type[BaseModel]] = [RunConfig]
    for part in location:
        if part in KINDS:  # pydantic names the branch of the union it took
            models = [model for model in models if part in typing.get_args(model.model_fields["kind"].annotation)]
        elif not part.isdigit():
            models = [m for model in models if part in model.model_fields for m in _models(model.model_fields[part].annotation)]
    return sorted({name for model in models for name in model.model_fields})


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return the section classes that an annotation names, through unions, lists and Annotated."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in _models(part)]
