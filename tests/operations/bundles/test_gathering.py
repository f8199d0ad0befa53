"""The steps of a bundle are read from a real Redis while the run trains."""

from __future__ import annotations

import pytest

from services.operations.bundles.gathering import Judged, StepReader
from services.protocol import codec
from services.protocol.errors import NotFound
from services.protocol.messages import StepPlan
from services.store import Store
from tests.support import flow


def _reader(store: Store) -> StepReader:
    return StepReader(store, lambda header, payload: Judged("answer", ""))


async def _buffered(store: Store) -> tuple[flow.Team, list[str]]:
    team = await flow.start(store)
    return team, await flow.buffer(store, team, 6)


async def _first_read(store: Store, size: int) -> tuple[flow.Team, list[str], StepReader]:
    """Prepare step 0 with `size` groups, and read it ahead."""
    team, groups = await _buffered(store)
    reader = _reader(store)
    await flow.prepare(store, team, 0, groups[:size])
    await reader.read_ahead(0, 0, 1)
    return team, groups, reader


async def _covered(store: Store, team: flow.Team, step: int) -> None:
    """Train the step, cover it by a checkpoint and delete it."""
    await store.steps.commit(team.trainer, step)
    await store.steps.publish(team.trainer, step + 1)
    await store.steps.checkpointed(team.trainer, step)
    await store.steps.retire()
    assert await store.inspection.kept_step(step) is None


async def test_what_was_read_ahead_survives_a_checkpoint(store: Store) -> None:
    team, groups = await _buffered(store)
    early, late = _reader(store), _reader(store)
    for step in range(2):
        await flow.prepare(store, team, step, groups[step : step + 1])
        await early.read_ahead(0, step, 1)
    for step in range(2):
        await _covered(store, team, step)
    steps, _ = await early.gather(0, 1)
    assert [codec.decode(each.plan, StepPlan).step for each in steps] == [0, 1]
    with pytest.raises(NotFound, match="step 1 cannot be recorded: the plan of step 0 or its groups are gone from Redis"):
        await late.gather(0, 1)


async def test_a_restore_abandons_what_was_read(store: Store) -> None:
    team, _, reader = await _first_read(store, 1)
    await _covered(store, team, 0)
    await reader.read_ahead(0, 0, 2)
    with pytest.raises(NotFound):
        await reader.gather(0, 0)


async def test_a_plan_that_was_prepared_again_is_read_again(store: Store) -> None:
    _, groups, reader = await _first_read(store, 2)
    plan, _ = flow.plan(0, groups[:1])
    await store.client.hset(store.keys.step(0), "plan", codec.encode(plan))
    [step], _ = await reader.gather(0, 0)
    assert codec.decode(step.plan, StepPlan).groups == groups[:1]
