"""What a requester learns about a restore: it is done, it failed, or another request replaced it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.operations.control import RunControl
from services.operations.inspection import checkpoints
from services.operations.inspection.checkpoints import AskedRestore
from services.store import Store
from tests.support.flow import start
from tests.support.harness import wait_until


async def requested(store: Store, step: int) -> asyncio.Task[AskedRestore]:
    """Request a restore and wait for it in the returned task."""
    control = RunControl(store, 10.0, checkpoints=Path("checkpoints"))
    task = asyncio.create_task(control.restore(step, "a spike", "ada", 60.0))

    async def noted() -> bool:
        state = await store.run.state()
        return state is not None and state.restore == step

    await wait_until(noted)
    return task


async def restored(store: Store, step: int) -> None:
    """Restore the run, as a trainer does."""
    trainer = await store.run.attach_trainer()
    await store.connection.call("restore_begin", trainer, step)
    await store.connection.call("restore_end", trainer, step, "committed_step", step)


@pytest.fixture(autouse=True)
def _every_step_has_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "restorable", lambda *_: None)


async def test_a_restore_is_done_once_the_run_has_begun_again(store: Store) -> None:
    await start(store)
    for step in (5, 5, 7):
        task = await requested(store, step)
        assert not task.done()
        await restored(store, step)
        assert await task == AskedRestore(step=step)


async def test_a_failed_restore_is_reported_with_its_reason(store: Store) -> None:
    team = await start(store)
    await store.run.finish("trained 9 of 9 steps")
    task = await requested(store, 5)
    await store.run.restore_failed(5, "rank-0/state.bin differs from the SHA-256", team.trainer)
    assert await task == AskedRestore(step=5, failure="rank-0/state.bin differs from the SHA-256")
    state = await store.run.state()
    assert state is not None
    assert (state.restore, state.finished) == (-1, "trained 9 of 9 steps")
    task = await requested(store, 5)
    await restored(store, 5)
    assert (await task).failure == "", "it was of an earlier request"


async def test_a_request_that_another_one_replaced_was_not_complied_with(store: Store) -> None:
    await start(store)
    first = await requested(store, 5)
    second = await requested(store, 3)
    await restored(store, 3)
    assert (await second).failure == ""
    assert (await first).failure == "a later request has restored the run to step 3 instead"
