"""Creates the run, or attaches to it.

Guarantees: a run with another configuration or other prompts is rejected and left unchanged; the error, on one line, names the
differences and the remedies.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from services.config import RunConfig, defining, digest
from services.config.differences import differing
from services.protocol.errors import DifferentRun
from services.store import Store
from services.store.records import TableRules

SHOWN_CHARACTERS = 190  # of the differences, since the line that reports an error is cut, and has to keep the remedies
VALUE_CHARACTERS = 40
OTHERWISE = "choose another run.name, or delete the run (its keys in Redis and its folder)"


async def create_or_attach(store: Store, config: RunConfig, dataset: str) -> None:
    """Create the run with the prompts `dataset`, or attach to it and set its number of steps. Raises `DifferentRun`."""
    described = defining(config)
    try:
        created = await store.run.create(digest(config), dataset, config.run.steps, config.slots, table_rules(config), described)
    except DifferentRun as error:
        raise await _explained(store, config, described, error) from None
    if not created:
        await store.run.set_steps(config.run.steps)  # those of the resumed run


def table_rules(config: RunConfig) -> TableRules:
    """Return the rules of a run's replay table."""
    replay = config.replay
    return TableRules(replay.sampler, replay.remover, replay.capacity, replay.max_uses)


async def _explained(store: Store, config: RunConfig, described: bytes, error: DifferentRun) -> DifferentRun:
    """Return the error with what differs. Raises `DifferentRun` itself if the run is of another version of the protocol."""
    state = await store.run.state()
    if state is None:  # it was deleted meanwhile
        return error
    if state.config == digest(config):
        return DifferentRun(
            f"run {config.run.name!r} exists with other prompts: the content of data.sources has changed since it began. "
            f"Restore that content, {OTHERWISE}"
        )
    found = differences(await store.run.defining(), described)
    return DifferentRun(
        f"run {config.run.name!r} exists with another configuration: {found}. These keys define the run and cannot change: set "
        f"them back, {OTHERWISE}"
    )


def differences(then: bytes, now: bytes) -> str:
    """Return which of the keys that define a run differ, and how; as many as fit, at least one."""
    if not then:
        return "which keys differ is unknown, since an older version created it"
    found = differing(msgspec.json.decode(then), msgspec.json.decode(now))
    told = list[str]()
    for key, (before, after) in found.items():
        line = _in_words(key, before, after)
        if told and len("; ".join((*told, line))) > SHOWN_CHARACTERS:
            return f"{'; '.join(told)}; and {len(found) - len(told)} more"
        told.append(line)
    return "; ".join(told)


def _in_words(key: str, before: Any, after: Any) -> str:
    if key.endswith((".function", ".run")) and isinstance(before, list) and isinstance(after, list):
        old, new = cast("list[str]", before), cast("list[str]", after)  # file, name in it, digest of its content
        if old[:2] == new[:2]:
            return f"{key} has another content of {new[0]}"
        before, after = ":".join(old[:2]), ":".join(new[:2])
    return f"{key} was {_shortened(before)} and is {_shortened(after)}"


def _shortened(value: Any) -> str:
    shown = "unset" if value is None else repr(value)
    return shown if len(shown) <= VALUE_CHARACTERS else f"{shown[: VALUE_CHARACTERS - 1]}…"
