"""What `grpo status` says of a run after a restore."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from services.console.commands.look import last_step
from services.operations.inspection.group import inspect_group
from services.store import Store
from tests.support.flow import issue, start


async def test_what_a_restore_has_undone_is_not_the_last_step_or_round(store: Store) -> None:
    attached: Any = SimpleNamespace(store=store)
    state: Any = SimpleNamespace(committed_step=-1)
    assert await last_step(attached, state) == {}
    assert await store.evaluation.last_record() == {}
    for step in range(10):
        await store.monitor.record({"step": float(step), "run/incarnation": 5.0, "loss": None if step == 3 else float(step)})
    state.committed_step = 9
    assert (await last_step(attached, state))["step"] == 9.0
    for version in (0, 4, 8):
        record = {"eval/version": float(version), "run/incarnation": 5.0}
        await store.client.xadd(store.keys.evaluations, {"m": msgspec.json.encode(record)})
    assert (await store.evaluation.last_record())["eval/version"] == 8.0
    await store.client.hset(store.keys.samples_state, "begun:17", 4)  # type: ignore[misc]
    state.committed_step = 3
    assert await last_step(attached, state) == {"step": 3.0, "run/incarnation": 5.0}, "without the loss, which is no number"
    assert (await store.evaluation.last_record())["eval/version"] == 4.0, "the version of the checkpoint"
    await store.monitor.record({"step": 4.0, "run/incarnation": 17.0})
    state.committed_step = 4
    assert (await last_step(attached, state))["run/incarnation"] == 17.0


async def test_a_ticket_that_a_restore_interrupted_is_found(store: Store) -> None:
    team = await start(store)
    await issue(store, team, 1)
    await store.client.xtrim(store.keys.tickets, maxlen=0)
    reader: Any = None
    assert (await inspect_group(store, "0-0", reader, None)).place == "moving"
    await store.client.zadd(store.keys.reissue, {"0-0": 0})
    found = await inspect_group(store, "0-0", reader, None)
    assert (found.place, found.where) == ("interrupted", "interrupted by a restore, to be issued again")
