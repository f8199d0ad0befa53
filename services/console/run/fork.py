"""Implements `grpo fork`: creates a run from a checkpoint of another run, with other settings.

Guarantees: the old run is only read; a folder that has a configuration has the complete checkpoint; a setting that the checkpoint
cannot continue with is refused with the reason. Groups that were not trained on are generated again, under the new settings. A
fork that was killed can be repeated.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec
from pydantic import ValidationError

from services.config import ConfigError, RunConfig, digest, to_toml
from services.config.base import Section
from services.config.differences import differing
from services.config.load import NOT_DEFINING, load_with_places, value_of
from services.config.loss import Loss
from services.config.places import COMMAND_LINE, KeyPlaces
from services.config.root import Redis
from services.config.verifiers import needs_answer, needs_row
from services.console.errors import EXIT_CONFIG, EXIT_OK, ConsoleError
from services.console.paths import existing
from services.console.printable import print_json
from services.console.run.folder import RunFolder
from services.console.run.resumption import record
from services.operations.history import EVALUATED, STEP, is_number, recorded
from services.operations.inspection.checkpoints import restorable
from services.runtime import atomic_folders
from services.runtime.atomic_folders import FileRecord, FolderError, FolderManifest
from services.runtime.checkpoints import SNAPSHOT, CheckpointError, CheckpointFolder, Saved
from services.store.snapshot_format import Snapshot, SnapshotError, Writer

FIXED = {
    "run.seed": "it determines the order of prompts, which the checkpoint continues",
    "data": "the checkpoint continues the order of the prompts that the run began with",
    "model": "the checkpoint has the weights and the optimizer state of the run's model",
    "lora": "the checkpoint has the weights and the optimizer state of the run's adapters",
    "reference": "the checkpoint has the reference policy",
    "replay": "the checkpoint has the clocks and counters of the replay table",
}
"""Keys and sections that a fork keeps -> why."""

KEPT: dict[str, Collection[str]] = {"api": {"host"}, "web": {"host"}, "redis": ()}
"""Sections whose other keys belong only to the old run: its addresses, secrets and server."""


def fork(run: str, at: int | None, overrides: Sequence[str], as_json: bool) -> int:
    """Create the folder of the new run, and in the working folder a configuration file to start it with."""
    found = existing(run)
    old = RunFolder(found.path, found.given)
    held = old.held()
    assert held is not None
    saved = _checkpoint(old, at)
    config = _configured(old, held, saved.step, overrides)
    new, file = RunFolder.of(config), Path(f"{config.run.name}.toml")
    text = f"# Forked from {old.path} at step {saved.step}.\n{to_toml(config)}".encode()
    left = file.exists() and file.read_bytes() == text  # by the same command, which was killed before it finished
    for path in (new.config, file):
        if path.exists() and not (path == file and left):
            raise ConsoleError(f"{path} already exists: give the new run another name with run.name=NAME", EXIT_CONFIG)
    try:
        copied = _copy(saved, new, config)
    except (FolderError, SnapshotError, OSError) as error:
        raise ConsoleError(f"{new.path} cannot be written: {error}", EXIT_CONFIG) from None
    for name, key, last in (("metrics", STEP, saved.step), ("evaluations", EVALUATED, saved.step + 1)):
        _history(getattr(old, name), getattr(new, name), key, last)
    changed = {key: values for key, values in _differences(held, config).items() if key != "run.name"}
    new.changes.unlink(missing_ok=True)
    record(new.changes, saved.step + 1, changed, forked_from=str(old.path))
    atomic_folders.replace(file, text)
    new.write(config)  # last: a folder with a configuration is a run
    if as_json:
        told = {"run": config.run.name, "folder": str(new.path), "file": str(file), "step": saved.step, "checkpoint": str(copied)}
        print_json({**told, "changes": {key: list(values) for key, values in changed.items()}})
    else:
        print(f"forked {old.path} at step {saved.step} into {new.path}; start it with `grpo run {file}`")
    return EXIT_OK


def _checkpoint(old: RunFolder, at: int | None) -> Saved:
    folder = CheckpointFolder(old.checkpoints)
    try:
        if at is None and (latest := folder.latest()) is None:
            raise CheckpointError(f"{old.checkpoints} has no checkpoint: write one with grpo checkpoint")
        return restorable(folder, latest.step if at is None else at)
    except CheckpointError as error:
        raise ConsoleError(str(error) if at is None else f"--at {at}: {error}", EXIT_CONFIG) from None


def _configured(old: RunFolder, held: RunConfig, step: int, overrides: Sequence[str]) -> RunConfig:
    """Return the new run's configuration. Raise `ConfigError` if the checkpoint cannot continue with it."""
    named = [f"run.name={held.run.name}-at-{step}", f"run.dir={json.dumps(str(old.path.parent), ensure_ascii=False)}"]
    given = [*named, *_defaults_of_loss(held.loss, overrides), *overrides]
    config, places = load_with_places(old.config, given, environ={}, before=lambda _: held)
    faults = [
        f"{places.of(key) or COMMAND_LINE}: {key} = {now!r} cannot differ from {before!r} in a fork, since {why}: leave it "
        "out, or start a new run from the export"
        for key, (before, now) in _differences(held, config).items()
        for fixed, why in FIXED.items()
        if (key == fixed or key.startswith(f"{fixed}.")) and (fixed != "reference" or config.loss.kl_beta)
    ]
    if config.run.steps <= step:
        faults.append(
            places.told(f"run.steps = {config.run.steps}, but up to step {step} the run has trained {step + 1}: raise it")
        )
    faults += [
        f"{COMMAND_LINE}: verifiers = {[verifier.kind for verifier in config.verifiers]} need other fields of the rows of source "
        f"{source.name!r}, which are part of the data that the run began with: keep their kinds, or start a new run"
        for source in config.data.sources
        for asks in (needs_answer, needs_row)
        if asks(held.verifiers, source.name) != asks(config.verifiers, source.name)
    ]
    if not faults:  # the code of environments is run last
        faults += _of_tools(held, config)
    if faults:
        raise ConfigError(*faults)
    kept = KEPT
    if config.redis.url == held.redis.url and not (old.redis / "password").exists():
        kept = {**KEPT, "redis": Redis.model_fields}  # another server must not receive the old one's password
    return config.model_copy(update={name: _own(name, getattr(config, name), keys, places) for name, keys in kept.items()})


def _of_tools(held: RunConfig, config: RunConfig) -> Iterator[str]:
    """Find sources whose environment offers other tools than before: prompts show them."""
    from services.chat.errors import DataError
    from services.dataprep.prompts.tools import tools_of

    for source in config.data.sources:
        before, now = held.environment_of(source.name), config.environment_of(source.name)
        if before == now:
            continue
        try:
            offered = [tools_of(each) for each in (before, now)]
        except DataError as error:
            yield f"{COMMAND_LINE}: environments: {error}"
            continue
        if offered[0] != offered[1]:
            names = [", ".join(tool["function"]["name"] for tool in tools) or "none" for tools in offered]
            differ = f"{names[1]} instead of {names[0]}" if names[0] != names[1] else f"{names[0]}, described differently"
            yield (
                f"{COMMAND_LINE}: environments: the tools of source {source.name!r} would be {differ}; they are part of the "
                "prompts, whose order the checkpoint continues: keep them, or start a new run from the export"
            )


def _own(name: str, section: Section, kept: Collection[str], places: KeyPlaces) -> Section:
    """Return a section with the keys that a fork keeps from the old run or is given, and the defaults of the others."""
    given = {key: value for key, value in section if key in kept or places.of(f"{name}.{key}") == COMMAND_LINE}
    return type(section)(**given)


def _defaults_of_loss(held: Loss, overrides: Sequence[str]) -> list[str]:
    """Return overrides for a fork with another loss.policy: keys that have a default of the old policy get that of the new one.

    The file of a run has every key, so that the defaults of the new policy would never apply.
    """
    asked = [text for key, _, text in (override.partition("=") for override in overrides) if key.strip() == "loss.policy"]
    if not asked or (policy := value_of(asked[-1])) == held.policy:
        return []
    try:
        before, now = Loss(policy=held.policy).model_dump(mode="json"), Loss(policy=policy).model_dump(mode="json")
    except ValidationError:
        return []  # loading names the fault
    kept = held.model_dump(mode="json")
    changed = [key for key in now if key != "policy" and kept[key] == before[key] != now[key]]
    return [f"loss.{key}={json.dumps(now[key])}" for key in changed]


def _differences(held: RunConfig, config: RunConfig) -> dict[str, tuple[object, object]]:
    """Return which keys differ, except those that only say where the run is executed."""
    carried = {name: keys for name, keys in NOT_DEFINING.items() if name in ("api", "web", "redis")}
    carried["run"] = {"dir"}
    return differing(*(each.model_dump(mode="json", exclude=carried) for each in (held, config)))


def _copy(saved: Saved, new: RunFolder, config: RunConfig) -> Path:
    """Write the checkpoint into the new run's folder, as one of that run; files that stay the same are links where possible."""
    final = new.checkpoints / saved.folder.name
    partial = atomic_folders.begin(final)
    for name in saved.manifest.files:
        if name != SNAPSHOT:
            target = partial / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(saved.folder / name, target)
            except OSError:  # another file system
                shutil.copyfile(saved.folder / name, target)
    snapshot = Snapshot(saved.folder / SNAPSHOT)
    writer = Writer(partial / SNAPSHOT)
    run = {**snapshot.head.run, "config": digest(config), "steps": str(config.run.steps)}
    writer.add(msgspec.structs.replace(snapshot.head, run=run, whole=False))
    for piece in snapshot.pieces():
        writer.add(piece)
    writer.close()
    body = (partial / SNAPSHOT).read_bytes()
    files = {**saved.manifest.files, SNAPSHOT: FileRecord(len(body), hashlib.sha256(body).hexdigest())}
    facts = {**saved.manifest.facts, "run": config.run.name}
    atomic_folders.finish(partial, final, FolderManifest(files, facts))
    atomic_folders.replace(new.checkpoints / "latest", final.name.encode())
    return final


def _history(old: Path, new: Path, key: str, last: int) -> None:
    """Copy the records up to that of the checkpoint, so that the new run's curve begins where the old one's did."""
    if old.exists():
        kept = [record for record in recorded(old) if is_number(record.get(key)) and record[key] <= last]
        new.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in kept))
