"""How a run is resumed: by which command, from which step, and with which changes of its configuration.

Guarantees: only keys of `CHANGEABLE` ever change; a run without a line in `changes.jsonl` has the settings that it began with. A
change is recorded, with the step from which it holds, before it is applied; `take_back` removes one that a killed start has
recorded but not applied.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from services.config import RunConfig
from services.config.differences import differing, flat
from services.config.load import CHANGEABLE
from services.config.secrets import holds_secret
from services.console.options import who
from services.console.run.folder import RunFolder, check_steps
from services.console.run.place import state_of
from services.operations.control import reason
from services.operations.inspection.deadletters import requeue
from services.runtime import atomic_folders
from services.store import Store
from services.store.client import masked

Changes = dict[str, tuple[Any, Any]]
"""Key -> its value before and now."""


async def next_step(config: RunConfig, password: str, folder: RunFolder, restore: int | None) -> int:
    """Return the step with which the run continues. `restore`: step of the checkpoint that --resume requests.

    Raise `ConsoleError` if run.steps is less than the steps that are trained by then.
    """
    state = await state_of(config, config.redis.url, password)
    if restore is None and state is not None:  # requested by grpo restore, or interrupted
        restore = next((step for step in (state.restore, state.restoring) if step >= 0), None)
    # If its Redis has lost the run, its latest checkpoint counts.
    known = folder.trained_steps() if state is None else state.committed_step + 1
    trained = known if restore is None else restore + 1
    check_steps(config, trained, restore)
    return trained


async def requeue_failed(store: Store, restore: int | None) -> int:
    """Resume a run that paused itself because prompts kept failing, and requeue those that failed in a row. Return how many.

    Earlier ones failed one by one, and probably would again: waiting together, they would pause the run as soon as it resumed.
    A run that is restored to a checkpoint (`restore`) goes back to before they failed, or issues them again.
    """
    state = await store.run.state()
    if state is None or not state.failing:
        return 0
    restored = restore is not None or max(state.restore, state.restoring) >= 0
    count = 0 if restored or state.ended else len((await requeue(store, await store.dead_letters.in_a_row())).requeued)
    await store.run.resume("dataprep", reason("grpo run", who()))
    return count


def again(argv: Sequence[str]) -> list[str]:
    """Return the arguments that resume a run: without --fresh and --resume, which were for its start, and without secrets."""
    words, given = list[str](), iter(argv)
    for word in given:
        if word == "--resume":
            next(given, "")
        elif word != "--fresh" and not word.startswith("--resume="):
            key, equals, _ = word.partition("=")
            words.append(f"{key}=SECRET" if equals and holds_secret(key) else masked(word))
    return words


def written(config: RunConfig, folder: RunFolder, before: RunConfig | None, restore: int | None, password: str) -> RunConfig:
    """Write the configuration into the run's folder, and record how it differs from that `before`, if the run is resumed.

    Raise `ConsoleError`, and write nothing, if the run is beyond its last step.
    """
    if before is None:
        return folder.write(config)
    begins = asyncio.run(next_step(config, password, folder, restore))
    take_back(folder.changes, before)
    if changed := changes(before, config):
        record(folder.changes, begins, changed)
        print(f"changed from step {begins} on: {in_words(changed)}", flush=True)
    return folder.write(config)


def changes(held: RunConfig, asked: RunConfig) -> Changes:
    """Return which keys of a run that may change differ."""
    return differing(*(config.model_dump(mode="json", include=CHANGEABLE) for config in (held, asked)))


def in_words(found: Changes) -> str:
    """Return the changes as one line."""
    return ", ".join(f"{key} from {before!r} to {now!r}" for key, (before, now) in found.items())


def record(file: Path, step: int, found: Mapping[str, tuple[Any, Any]], forked_from: str = "") -> None:
    """Append the changes to the run's history: they hold from `step` on. `forked_from`: folder of the run that it came from."""
    line: dict[str, Any] = {"step": step, "time_s": time.time()}
    if forked_from:
        line["forked_from"] = forked_from
    line["changes"] = {key: list(values) for key, values in found.items()}
    with file.open("ab") as lines:
        lines.write(msgspec.json.encode(line) + b"\n")


def take_back(file: Path, held: RunConfig) -> None:
    """Remove the last changes of the history if the run's configuration `held` does not have them, and a torn line after them."""
    kept = _whole_lines(file)
    if kept and _unmade(msgspec.json.decode(kept[-1]), flat(held.model_dump(mode="json", include=CHANGEABLE))):
        del kept[-1]
    if file.exists() and len(whole := b"".join(kept)) < file.stat().st_size:
        atomic_folders.replace(file, whole)


def _whole_lines(file: Path) -> list[bytes]:
    """Return the lines of a history, without a last line that a kill has torn."""
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return lines[:-1] if lines and not lines[-1].endswith(b"\n") else lines


def _unmade(line: dict[str, Any], held: Mapping[str, Any]) -> bool:
    """Return whether all keys have their values from before these changes. Those of a fork are made with its configuration."""
    return "forked_from" not in line and all(held.get(key) == before for key, (before, _) in line["changes"].items())
