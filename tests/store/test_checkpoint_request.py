"""A request for a checkpoint stays in Redis until a checkpoint is complete."""

from __future__ import annotations

import pytest

from services.operations.inspection.checkpoints import request_checkpoint_of
from services.protocol.errors import NotFound
from services.store import RunState, Store


async def _state(store: Store) -> RunState:
    state = await store.run.state()
    assert state is not None
    return state


async def test_a_request_is_met_and_can_be_repeated(store: Store) -> None:
    store = store
    with pytest.raises(NotFound, match="does not exist yet"):
        await request_checkpoint_of(store, "by hand")
    await store.run.create("config", "dataset", steps=9, slots=8)
    first = await request_checkpoint_of(store, "by hand")
    assert (first.step, first.saved) == (0, False)
    request = (await _state(store)).checkpoint
    assert request.endswith(" by hand")
    assert await request_checkpoint_of(store, "REST") == first
    assert (await _state(store)).checkpoint == request
    await store.run.checkpoint_failed("disk full")
    state = await _state(store)
    assert (state.checkpoint, state.checkpoint_failed) == (request, "disk full")
    assert await request_checkpoint_of(store, "once more") == first
    assert (await _state(store)).checkpoint.endswith(" once more")
    await store.steps.checkpointed(await store.run.attach_trainer(), 0)
    state = await _state(store)
    assert (state.checkpoint, state.checkpoint_failed, state.checkpointed_step) == ("", "", 0)
    again = await request_checkpoint_of(store, "REST")
    assert (again.step, again.saved) == (0, True)
    assert not (await _state(store)).checkpoint


async def test_a_finished_run_rejects_the_request(store: Store) -> None:
    await store.run.create("config", "dataset", steps=9, slots=8)
    await store.run.finish("lost its disk")
    with pytest.raises(NotFound, match=r"has finished \(lost its disk\) without a checkpoint of step 0"):
        await request_checkpoint_of(store, "by hand")
