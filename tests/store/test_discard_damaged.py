"""Damaged groups leave every pending step as dead letters: no ticket is lost, no slot leaks, no group is trained on twice."""

from __future__ import annotations

import pytest

from services.operations.inspection.ledger import audit
from services.protocol.errors import Fenced, OutOfOrder
from services.store import Store
from services.store.records import TableRules
from tests.support import flow
from tests.support.flow import Team, buffer, prepare, start

WHY = {"0-1": "payload 0-1.7: it is gone"}


async def discard_damaged(store: Store, team: Team, first: int, prepared: int, *steps: tuple[int, list[str]]) -> int:
    """Discard group 0-1 as damaged; `steps` are the new plans, with the groups that they keep."""
    return await store.steps.discard_damaged(
        team.trainer, first, prepared, WHY, [flow.plan(step, groups) for step, groups in steps]
    )


async def whole(store: Store, **outcomes: int) -> None:
    """Check that nothing is lost or duplicated, that the slots are right, and that the outcomes have these counts."""
    report = await audit(store)
    assert report.ok, report.messages
    assert {name: count for name, count in report.outcomes.items() if count} == outcomes


async def test_a_discarded_group_is_dead_lettered_and_can_be_requeued(store: Store) -> None:
    team = await start(store)
    await buffer(store, team, 4)
    await prepare(store, team, 0, ["0-0", "0-1"])
    await prepare(store, team, 1, ["0-2", "0-3"])
    assert await discard_damaged(store, team, 0, 1, (0, ["0-0"])) == 1
    plan = await store.steps.plan(0)
    assert plan is not None
    assert plan.groups == ["0-0"]
    (letter,) = await store.dead_letters.page()
    assert (letter.ticket, letter.reason, letter.failed) == ("0-1", WHY["0-1"], True)
    assert b"0-1" in letter.body, "its header goes with it"
    await whole(store, failed=1)
    assert [key async for key in store.client.scan_iter(match="*0-1*")] == []
    assert await discard_damaged(store, team, 0, 1, (0, ["0-0"])) == 0, "a repeated call changes nothing"
    for step in (0, 1):
        await store.steps.commit(team.trainer, step)
        await store.steps.publish(team.trainer, step + 1)
    await whole(store, failed=1, trained=3)
    assert (await store.run.audit())["slots_used"] == 0
    (answer,) = await store.dead_letters.requeue([letter.id])
    assert answer.refusal == ""


async def test_a_step_may_lose_all_its_groups(store: Store) -> None:
    team = await start(store)
    await buffer(store, team, 2)
    await prepare(store, team, 0, ["0-1"])
    assert await discard_damaged(store, team, 0, 0, (0, [])) == 1
    await store.steps.commit(team.trainer, 0)
    await store.steps.publish(team.trainer, 1)
    await whole(store, failed=1)


async def test_discarding_is_rejected_if_a_step_was_prepared_meanwhile(store: Store) -> None:
    team = await start(store)
    await buffer(store, team, 3)
    await prepare(store, team, 0, ["0-0", "0-1"])
    await prepare(store, team, 1, ["0-2"])
    before = await store.run.audit()
    with pytest.raises(OutOfOrder, match="step 1 was prepared meanwhile"):
        await discard_damaged(store, team, 0, 0, (0, ["0-0"]))
    await store.run.attach_trainer()
    with pytest.raises(Fenced):
        await discard_damaged(store, team, 0, 1, (0, ["0-0"]))
    assert await store.run.audit() == before


@pytest.mark.parametrize("published", [0, 1])
async def test_discarding_from_a_retrained_step_undoes_its_outcome(store: Store, published: int) -> None:
    team = await start(store)
    await buffer(store, team, 2)
    await prepare(store, team, 0, ["0-0", "0-1"])
    await store.steps.commit(team.trainer, 0)
    await store.steps.publish(team.trainer, published)
    assert await discard_damaged(store, team, 0, 0, (0, ["0-0"])) == 1
    await whole(store, failed=1, trained=1)
    await store.steps.publish(team.trainer, 1)
    await whole(store, failed=1, trained=1)
    assert await store.client.getbit(store.keys.trained(0), 1) == 0


@pytest.mark.parametrize("sampler", ["fifo", "prioritized"])
async def test_a_discarded_replayed_group_stays_trained(store: Store, sampler: str) -> None:
    team = await start(store, table=TableRules(max_uses=3, sampler=sampler))
    await buffer(store, team, 2)
    for step in range(3):
        await prepare(store, team, step, ["0-0", "0-1"])
        if step == 0:
            await store.steps.commit(team.trainer, 0)
            await store.steps.publish(team.trainer, 1)
    assert await discard_damaged(store, team, 1, 2, (1, ["0-0"]), (2, ["0-0"])) == 1
    await whole(store, trained=2)
    for step in (1, 2):
        plan = await store.steps.plan(step)
        assert plan is not None
        assert plan.groups == ["0-0"]
    (letter,) = await store.dead_letters.page()
    assert not letter.failed
    (answer,) = await store.dead_letters.requeue([letter.id])
    assert "trained before" in answer.refusal
    for step in (1, 2):
        await store.steps.commit(team.trainer, step)
        await store.steps.publish(team.trainer, step + 1)
    await store.steps.checkpointed(team.trainer, 2)
    assert await store.steps.retire() == 3
    assert [key async for key in store.client.scan_iter(match="*:group:*")] == []
