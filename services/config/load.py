"""Load a configuration. Precedence: TOML file < environment (GRPO__SECTION__KEY) < command line (section.key=value).

Guarantees: every fault is a line that names its place, the key, the value and the remedy, and a `ConfigError` has all faults that
can be told from the configuration alone; an unknown key from any of the three sources is refused, and the message suggests the
nearest valid name.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
from pydantic import ValidationError

from services.config.consistency import broken
from services.config.derived import derived
from services.config.environments import code_key, code_of, environment_file
from services.config.faults import explained, keys_of, models_of, without
from services.config.generation import Generator, owned_options
from services.config.places import COMMAND_LINE, KeyPlaces
from services.config.root import RunConfig
from services.config.secrets import shown
from services.config.training import Trainer
from services.config.unused_keys import unused_keys

ENV_PREFIX = "GRPO__"
_ENTRY = re.compile(r"\[(\d+)\]")
"""`sources[0]`, as some write `sources.0`."""


class ConfigError(ValueError):
    """A configuration that cannot be used. Each of its faults is a line that names the key, the value and the remedy."""

    def __init__(self, *faults: str, rest: RunConfig | None = None, places: KeyPlaces | None = None) -> None:
        """`rest`: what can be used without the faulty keys, which then have their defaults, to look for further faults in."""
        super().__init__("; ".join(faults))
        self.faults, self.rest, self.places = faults, rest, places


ROUNDS = 4
"""Times that faulty keys are left out to find further ones: an error can hide others of its section."""

Before = Callable[[RunConfig], RunConfig | None]
"""Returns the configuration that a run began with, or None if it has not begun; unused keys set there are accepted."""


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    before: Before = lambda config: None,
) -> RunConfig:
    """Read `path`, apply the environment and then the `section.key=value` overrides, and validate."""
    return load_with_places(path, overrides, environ, before)[0]


def load_with_places(
    path: str | Path,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    before: Before = lambda config: None,
) -> tuple[RunConfig, KeyPlaces]:
    """Do the same as `load`, and also return where each key is set."""
    text = _text(Path(path))
    tree, places = _parsed(Path(path), text), KeyPlaces(str(path), text)
    faults = list[str]()
    for name, given in sorted((os.environ if environ is None else environ).items()):
        if fault := _lookalike(name):
            faults.append(fault)
        if name.startswith(ENV_PREFIX):
            place, keys = f"environment variable {name}", name[len(ENV_PREFIX) :].lower().split("__")
            faults += _assigned(tree, keys, given, place, places)
    for override in overrides:
        key, equals, given = override.partition("=")
        key = _ENTRY.sub(r".\1", key)
        if equals and key.strip():
            faults += _assigned(tree, key.strip().split("."), given, COMMAND_LINE, places)
        else:
            faults.append(
                f"{COMMAND_LINE}: override {override!r} is not of the form section.key=value: write the key and its value"
            )
    _place_functions(tree, Path(path).absolute().parent)
    faults += map(places.told, _read_template(tree, Path(path).absolute().parent))
    return _validated(tree, places, before, faults), places


def load_resolved(path: str | Path) -> RunConfig:
    """Read a configuration that `to_toml` wrote, ignoring the environment and the command line.

    Accept unused keys: the version that wrote the file may have accepted them, and its run must stay readable and resumable.
    """
    return validate(_parsed(Path(path), _text(Path(path))), str(path), before=lambda config: config)


def validate(tree: Mapping[str, Any], origin: str, before: Before = lambda config: None) -> RunConfig:
    """Turn a tree of values into a `RunConfig`, or raise a `ConfigError` with all unknown keys, invalid values, unused keys and
    broken rules. A key that is left out because of its fault counts as its default in the rules."""
    return _validated(tree, KeyPlaces(origin), before, [])


def _validated(tree: Mapping[str, Any], places: KeyPlaces, before: Before, faults: list[str]) -> RunConfig:
    faults, config, left = list(faults), None, copy.deepcopy(dict(tree))
    stood_in = set[str]()  # keys whose values were left out
    left_out = set[tuple[str | int, ...]]()  # the same: that they are then missing is not the user's fault
    for _ in range(ROUNDS):
        try:
            config = RunConfig.model_validate(left)
            break
        except ValidationError as error:
            errors = [fault for fault in error.errors(include_url=False) if keys_of(fault) not in left_out]
            lines = [explained(fault) for fault in errors]
            faults += map(places.told, lines)
            stood_in.update(key for line in lines for key in places.named(line))
            left_out.update(map(keys_of, errors))
            for fault in errors:
                without(left, keys_of(fault))
    if config is not None:
        config = derived(config)
        rules = (
            *_refused(config, before),
            *broken(config),
        )  # a rule broken only by the default in place of a faulty value is not a fault
        faults += [places.told(line) for line in rules if not stood_in & set(places.named(line))]
    if faults or config is None:
        raise ConfigError(*faults, rest=config, places=places)
    return config


def to_toml(config: RunConfig) -> str:
    """Return the complete configuration as TOML; reading it back gives an equal `RunConfig`."""
    return msgspec.toml.encode(config.model_dump(mode="json", exclude_none=True)).decode()


CARRIED_OUT: dict[str, Any] = {
    "api": True,
    "web": True,
    "tracking": True,
    "samples": True,
    "tracing": True,
    "sync": True,
    "checkpoint": True,
    "fleet": True,
    "redis": True,
    "run": {"dir"},
    "generator": {
        **dict.fromkeys(Generator.model_fields.keys() - {"engine", "engine_options"}, True),
        "engine_options": {"gpu_memory_utilization", "kv_cache_memory_bytes"},
    },
    "trainer": set(Trainer.model_fields) - {"mini_batches", "deterministic"},
}
"""Keys that say how and where a run is executed. They may change when it is resumed."""

CHANGEABLE: dict[str, Any] = {"run": {"steps"}, "optimizer": True, "filters": True, "evaluation": True}
"""Keys that say how a run continues. They may change when it is resumed; each change is recorded with its step."""
NOT_DEFINING = {**CARRIED_OUT, **CHANGEABLE, "run": CARRIED_OUT["run"] | CHANGEABLE["run"]}


def digest(config: RunConfig) -> str:
    """Return the SHA-256 (16 hex digits) of the keys that define the run (`defining`). Raises `ConfigError`."""
    return hashlib.sha256(defining(config)).hexdigest()[:16]


def defining(config: RunConfig) -> bytes:
    """Return the keys that define the run, as JSON: all but those of `CARRIED_OUT` and `CHANGEABLE`.

    For `path.py:name` of a verifier or an environment the content of the file counts, not its folder. Raises `ConfigError` if it
    cannot be read.
    """
    tree = config.model_dump(mode="json", exclude=NOT_DEFINING)
    for verifier, described in zip(config.verifiers, tree["verifiers"], strict=True):
        if verifier.kind == "python" and verifier.file:
            described["function"] = [Path(verifier.file).name, verifier.function.rpartition(":")[2], code_digest(verifier.file)]
    for environment, described in zip(config.environments, tree["environments"], strict=True):
        if file := environment_file(environment):
            described[code_key(environment)] = [Path(file).name, code_of(environment).rpartition(":")[2], code_digest(file)]
        described.pop("interpreter")  # says where it runs, not what it does
    return msgspec.json.encode(tree, order="sorted")


def code_digest(path: str) -> str:
    """Return the SHA-256 of a file of code. Raises `ConfigError` if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"the file of a function, {path}, cannot be read ({error.strerror}): correct the path") from None


def _lookalike(name: str) -> str:
    """Return why a variable is refused that is meant for a key but is not read, such as GRPO_RUN_STEPS; "" if it is accepted."""
    section, _, key = name.removeprefix("GRPO_").lower().partition("_")
    if not name.startswith("GRPO_") or name.startswith(ENV_PREFIX) or section not in RunConfig.model_fields:
        return ""
    fields = [field for model in models_of(RunConfig.model_fields[section].annotation) for field in model.model_fields]
    if near := difflib.get_close_matches(key, fields, n=1, cutoff=0.85):
        meant = f"{ENV_PREFIX}{section}__{near[0]}".upper()
        return f"environment variable {name} is not read: did you mean {meant}? Rename or unset it"
    return ""


def _place_functions(tree: dict[str, Any], folder: Path) -> None:
    """Make the paths of verifiers' and environments' code absolute; relative ones start at the configuration's folder."""
    listed = [tree.get("verifiers"), tree.get("environments")]
    for described in [each for tables in listed if isinstance(tables, list) for each in cast("list[Any]", tables)]:
        table = _table(described)
        for key in ("function", "run"):
            function = table.get(key) if table else None
            if table and isinstance(function, str) and function.rpartition(":")[0].endswith(".py"):
                place, _, name = function.rpartition(":")
                table[key] = f"{folder / Path(place).expanduser()}:{name}"
        interpreter = table.get("interpreter") if table else None
        if table and isinstance(interpreter, str) and "/" in interpreter:
            table["interpreter"] = str(folder / Path(interpreter).expanduser())


def _read_template(tree: dict[str, Any], folder: Path) -> list[str]:
    """Replace the path of a chat template by its text, so that a run keeps the one it began with; return the fault."""
    data = _table(tree.get("data"))
    given = data.get("chat_template") if data else None
    if data is None or not isinstance(given, str) or not given.endswith(".jinja"):
        return []
    file = folder / Path(given).expanduser()
    try:
        data["chat_template"] = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        del data["chat_template"]
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error.strerror)
        return [f"data.chat_template = {given!r}: {file} cannot be read: {reason}; correct the path"]
    return []


def _refused(config: RunConfig, before: Before) -> list[str]:
    """Return the keys that have no effect and the engine's options that must not be set, except those of the configuration that
    the run began with, which an earlier version accepted.
    """
    if (found := _unwanted(config)) and (begun := before(config)):
        known = set(_unwanted(begun))
        found = [line for line in found if line not in known]
    return found


def _unwanted(config: RunConfig) -> list[str]:
    return [*unused_keys(config), *owned_options(config.generator)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"configuration file {path} does not exist: correct the path, or write one with grpo init") from None
    except OSError as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration file {path} is not valid TOML: it is not UTF-8 ({error}); save it as UTF-8") from None


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"configuration file {path} is not valid TOML: {error}; correct it there") from None


def _assigned(tree: dict[str, Any], parts: list[str], text: str, place: str, places: KeyPlaces) -> list[str]:
    """Put a value into the tree, and return the faults in its key."""
    node: object = tree
    key, value = ".".join(parts), value_of(text)
    for at, part in enumerate(parts[:-1]):
        table = _table(node)
        if table is not None:
            node = table.setdefault(part, {})
        elif isinstance(node, list) and part.isdigit() and int(part) < len(entries := cast("list[Any]", node)):
            node = entries[int(part)]
        else:
            have = f"{'.'.join(parts[:at])} has {len(cast('list[Any]', node))} entries, from 0" if isinstance(node, list) else ""
            why = f"{part!r} does not name a section or an entry{f' ({have})' * bool(have)}"
            return [f"{place}: {key} = {shown(key, value)}: {why}: correct the key"]
    if (table := _table(node)) is None:
        return [f"{place}: {key} = {shown(key, value)}: {'.'.join(parts[:-1])} is not a section: correct the key"]
    table[parts[-1]] = value
    places.put(key, place)
    return []


def _table(node: object) -> dict[str, Any] | None:
    return cast("dict[str, Any]", node) if isinstance(node, dict) else None


def value_of(text: str) -> Any:
    """Parse a TOML value; return text that is not one unchanged, so that strings need no quotes."""
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return found["value"] if len(found) == 1 else text  # otherwise its later lines are read as keys
