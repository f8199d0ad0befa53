"""Follow a group when a process dies: nothing is lost, and nothing is done twice."""

from __future__ import annotations

import pytest

from services.operations.inspection.ledger import audit
from services.protocol.errors import Fenced
from services.store import Store
from tests.support.flow import buffer, claim, issue, prepare, start, submit
from tests.support.harness import ticket


async def test_a_generator_dies_and_another_finishes_its_ticket(store: Store) -> None:
    """The dead pod's lease expires. The next claim gets the ticket, with a higher fencing number and the tokens so far."""
    team = await start(store)
    await issue(store, team, 1)
    (dead,) = await claim(store, "generator-0")
    await store.tickets.save_partial("generator-0", dead, b"tokens so far", ttl_s=60)

    (alive,) = await claim(store, "generator-1", lease_s=0.0)  # a lease of 0 s: every other lease has expired
    assert alive.fence > dead.fence
    assert await store.tickets.load_partial(alive.ticket_id) == b"tokens so far"

    assert await submit(store, "generator-1", alive)
    assert not await submit(store, "generator-0", dead), "it was not dead after all, but too late: rejected, not stored twice"
    assert (await audit(store)).places["headers"] == 1


async def test_a_standby_takes_over_and_the_old_leader_is_fenced_off(store: Store) -> None:
    """Every write of dataprep carries the fencing number of its leadership."""
    team = await start(store)
    await store.run.step_down("leader-0:boot")  # or its lease expired
    new = await store.run.lead("leader-1:boot", lease_s=10)
    assert new is not None
    with pytest.raises(Fenced):
        await store.tickets.issue(team.leader, 0, [ticket(0)])
    assert await store.tickets.issue(new, 0, [ticket(0)]) == 1


async def test_a_reply_is_lost_and_the_call_is_retried(store: Store) -> None:
    """The client retries calls when a connection breaks, so every call must be idempotent."""
    team = await start(store)
    assert await store.tickets.issue(team.leader, 0, [ticket(0)]) == 1
    assert await store.tickets.issue(team.leader, 0, [ticket(0)]) == 0
    (one,) = await claim(store, "g")
    assert await submit(store, "g", one)
    assert await submit(store, "g", one)
    assert (await audit(store)).issued == (await audit(store)).places["headers"] == 1


async def test_a_trainer_dies_after_its_commit(store: Store) -> None:
    """Its successor loads the checkpoint and trains the step again on the same plan. The second commit changes nothing."""
    team = await start(store)
    await buffer(store, team, 1)
    await prepare(store, team, 0, ["0-0"])
    before = await store.steps.plan(0)
    assert await store.steps.commit(team.trainer, 0)
    successor = await store.run.attach_trainer()
    assert await store.steps.plan(0) == before
    assert not await store.steps.commit(successor, 0)
    report = await audit(store)
    assert (report.outcomes["trained"], report.doubled) == (1, 0)
