"""The code of a run's own verifiers and environments: files that are copied into its folder when it begins, and used to its end.

Guarantees: a run that is resumed is scored by the same code, whatever has become of the original files since; a copy is whole,
however often a start is killed.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from services.config import ConfigError, RunConfig
from services.config.environments import code_key, code_of, environment_file
from services.config.load import code_digest
from services.config.verifiers import named
from services.runtime import atomic_folders


def with_kept_code(config: RunConfig, held: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return `config` with the copies that `held`, the run in the folder, began with, and the files that differ from theirs."""
    changed: list[str] = []
    copies = {name: function for _, name, function, _ in _functions(held)}
    placed: dict[str, str] = {}
    for _, name, function, file in _functions(config):
        if name in copies and _names(copies[name]) == _names(function):
            copy = copies[name].rpartition(":")[0]
            if not Path(file).is_file() or code_digest(file) != code_digest(copy):
                changed.append(file)
            placed[name] = copies[name]
    return _with(config, placed), changed


def keep_code(config: RunConfig, folder: Path) -> RunConfig:
    """Copy the files of functions into `folder`, unless they are the copies, and return the configuration with the copies.

    Raises `ConfigError` for a file that cannot be read, `FolderError` for a copy that cannot be written.
    """
    placed: dict[str, str] = {}
    for key, name, function, file in _functions(config):
        copy = (folder / name / Path(file).name).absolute()
        if Path(file) != copy:  # an existing copy is of a start that was killed before the run began
            try:
                code_digest(file)
            except ConfigError as error:
                raise ConfigError(f"{key} = {function!r}: {error}") from None
            copy.parent.mkdir(parents=True, exist_ok=True)
            atomic_folders.replace(copy, Path(file).read_bytes())
        placed[name] = f"{copy}:{_names(function)[1]}"
    return _with(config, placed)


@contextlib.contextmanager
def copied(config: RunConfig) -> Iterator[RunConfig]:
    """Yield the configuration with copies of these files as a run would make them, for a trial: each is alone in its folder."""
    with tempfile.TemporaryDirectory(prefix="grpo-code-") as folder:
        yield keep_code(config, Path(folder))


def _functions(config: RunConfig) -> list[tuple[str, str, str, str]]:
    """Return key, name, function and file of each verifier and environment whose code is in a file."""
    verifiers = [
        (f"verifiers.{index}.function", name, each.function, each.file)
        for index, (name, each) in enumerate(named(config.verifiers))
        if each.kind == "python"
    ]
    environments = [
        (f"environments.{index}.{code_key(each)}", each.name, code_of(each), environment_file(each))
        for index, each in enumerate(config.environments)
    ]
    return [described for described in (*verifiers, *environments) if described[3]]


def _names(function: str) -> tuple[str, str]:
    """Return the names of a file and of its function."""
    place, _, name = function.rpartition(":")
    return Path(place).name, name


def _with(config: RunConfig, functions: dict[str, str]) -> RunConfig:
    """Return the configuration with new places of its functions, given by verifier or environment."""
    verifiers = [
        each.model_copy(update={"function": functions[name]}) if name in functions else each
        for name, each in named(config.verifiers)
    ]
    environments = [
        each.model_copy(update={code_key(each): functions[each.name]}) if each.name in functions else each
        for each in config.environments
    ]
    return config.model_copy(update={"verifiers": verifiers, "environments": environments})
