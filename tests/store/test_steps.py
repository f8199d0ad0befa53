"""Steps are prepared in order and committed once. Publishing frees their slots; their plans are kept for a checkpoint."""

from __future__ import annotations

import pytest

from services.protocol import codec
from services.protocol.errors import Damaged, Fenced, OutOfOrder, StoreError
from services.protocol.payloads import Payload
from services.store import Store
from services.store.records import TableRules
from tests.support import flow
from tests.support.flow import buffer, counts, plan, prepare, start


async def test_a_plan_is_read_back_whole_and_by_rank(store: Store) -> None:
    team = await start(store)
    await buffer(store, team, 1)
    (group,) = await flow.oldest_groups(store, 1)
    step, ranks = plan(0, ["0-0"], [group.header.payload])
    assert await store.steps.plan(0) is None
    await store.steps.prepare(team.leader, step, ranks)
    assert await store.steps.plan(0) == step
    assert await store.steps.rank_plan(0, 0) == ranks[0]
    with pytest.raises(StoreError, match="step 0 was planned without rank 1: start as many ranks"):
        await store.steps.rank_plan(0, 1)
    fetched = await store.steps.payloads([group.header.payload])
    assert fetched[group.header.payload].lengths.tolist() == [2, 2, 2, 2]


async def test_steps_are_prepared_in_order(store: Store) -> None:
    team = await start(store)
    await buffer(store, team, 2)
    with pytest.raises(OutOfOrder, match="step 1 does not follow prepared step -1"):
        await prepare(store, team, 1, ["0-0"])
    await prepare(store, team, 0, ["0-0"])
    with pytest.raises(OutOfOrder):
        await prepare(store, team, 0, ["0-1"])


async def test_preparing_the_same_plan_again_changes_nothing(store: Store) -> None:
    team = await start(store)
    await buffer(store, team, 2)
    await prepare(store, team, 0, ["0-0"])
    before = await store.run.audit()
    await prepare(store, team, 0, ["0-0"])
    assert await store.run.audit() == before
    assert (before["buffered"], before["prepared"]) == (1, 1)


@pytest.mark.parametrize(
    ("groups", "oldest_fresh", "why"),
    [(["0-9"], 0, "0-9 is not in the replay table"), (["0-0", "0-0"], 0, "0-0 is drawn twice"), (["0-0"], 1, "0-0 is stale")],
)
async def test_a_plan_that_contradicts_the_table_is_rejected(
    store: Store, groups: list[str], oldest_fresh: int, why: str
) -> None:
    team = await start(store)
    await buffer(store, team, 2)
    before = await store.run.audit()
    with pytest.raises(OutOfOrder, match=why):
        await prepare(store, team, 0, groups, oldest_fresh)
    assert await store.run.audit() == before


async def test_slots_are_freed_by_publication_and_not_before(store: Store) -> None:
    team = await start(store)
    await buffer(store, team, 3)

    async def slots() -> int:
        return (await store.run.audit())["slots_used"]

    await prepare(store, team, 0, ["0-0", "0-1"])
    assert await store.steps.commit(team.trainer, 0)
    assert await slots() == 3
    assert await store.steps.publish(team.trainer, 1)
    assert await slots() == 1
    assert not await store.steps.publish(team.trainer, 1)
    assert not await store.steps.publish(team.trainer, 0)
    assert await slots() == 1


async def test_one_publication_may_cover_several_steps(store: Store) -> None:
    team = await start(store)
    await buffer(store, team, 3)
    for step in range(3):
        await prepare(store, team, step, [f"0-{step}"])
        await store.steps.commit(team.trainer, step)
    assert await store.steps.publish(team.trainer, 3)
    assert (await store.run.audit())["slots_used"] == 0


async def test_commits_are_idempotent_and_in_order(store: Store) -> None:
    team = await start(store)
    await buffer(store, team, 2)
    with pytest.raises(OutOfOrder):
        await store.steps.commit(team.trainer, 0)
    await prepare(store, team, 0, ["0-0"])
    await prepare(store, team, 1, ["0-1"])
    with pytest.raises(OutOfOrder):
        await store.steps.commit(team.trainer, 1)
    assert await store.steps.commit(team.trainer, 0)
    assert not await store.steps.commit(team.trainer, 0)
    with pytest.raises(OutOfOrder, match="version 2 contains steps that are not committed"):
        await store.steps.publish(team.trainer, 2)
    audit = await store.run.audit()
    assert (audit["ledger:trained"], audit["prepared"]) == (1, 1)


async def test_a_newer_trainer_fences_off_the_older(store: Store) -> None:
    team = await start(store)
    await buffer(store, team, 1)
    await prepare(store, team, 0, ["0-0"])
    new = await store.run.attach_trainer()
    assert new > team.trainer
    for call in (
        store.steps.commit(team.trainer, 0),
        store.steps.publish(team.trainer, 1),
        store.steps.checkpointed(team.trainer, 0),
    ):
        with pytest.raises(Fenced, match="superseded"):
            await call
    assert await store.steps.commit(new, 0)


async def test_a_group_trains_max_uses_times_with_a_slot_for_the_first(store: Store) -> None:
    team = await start(store, table=TableRules(max_uses=2))
    await buffer(store, team, 2)
    await prepare(store, team, 0, ["0-0", "0-1"])
    assert [(g.group, g.uses) for g in await flow.oldest_groups(store, 9)] == [("0-0", 1), ("0-1", 1)]
    await store.steps.commit(team.trainer, 0)
    await store.steps.publish(team.trainer, 1)
    assert (await store.run.audit())["slots_used"] == 0
    await prepare(store, team, 1, ["0-0"])
    assert (await store.replay.sweep_and_peek(team.leader, 1, 5)).stale == 1, "0-1 is too old for a second use"
    await store.steps.commit(team.trainer, 1)
    await store.steps.publish(team.trainer, 2)
    assert await flow.oldest_groups(store, 9) == []
    audit = await counts(store)
    assert (audit["ledger:trained"], audit.get("ledger:stale", 0), audit.get("slots_used", 0)) == (2, 0, 0)
    assert "ledger:doubled" not in audit


async def keys_of(store: Store, *kinds: str) -> list[str]:
    """Return the names of the keys of some kinds, without the prefix."""
    names = [key.decode().removeprefix(store.keys.prefix + ":") async for key in store.client.scan_iter()]
    return sorted(name for name in names if name.split(":")[0] in kinds)


async def test_plans_and_payloads_stay_until_a_checkpoint_covers_them(store: Store) -> None:
    team = await start(store)
    await buffer(store, team, 3)
    for step in range(3):
        await prepare(store, team, step, [f"0-{step}"])
        await store.steps.commit(team.trainer, step)
    await store.steps.publish(team.trainer, 2)
    assert await store.steps.retire() == 0, "no checkpoint yet"
    await store.steps.checkpointed(team.trainer, 0)
    assert await store.steps.retire() == 1
    assert await keys_of(store, "step", "group") == ["group:0-1", "group:0-2", "step:1", "step:2"]
    await store.steps.checkpointed(team.trainer, 2)
    assert await store.steps.retire() == 1, "step 2 is not published"
    await store.steps.publish(team.trainer, 3)
    assert await store.steps.retire() == 1
    assert await keys_of(store, "step", "group", "payload", "departed") == []


async def test_a_group_used_twice_outlives_its_first_step(store: Store) -> None:
    team = await start(store, table=TableRules(max_uses=2))
    await buffer(store, team, 1)
    for step in range(2):
        await prepare(store, team, step, ["0-0"])
        await store.steps.commit(team.trainer, step)
        await store.steps.publish(team.trainer, step + 1)
    await store.steps.checkpointed(team.trainer, 0)
    assert await store.steps.retire() == 1
    assert len(await keys_of(store, "payload")) == 1
    await store.steps.checkpointed(team.trainer, 1)
    assert await store.steps.retire() == 1
    assert await keys_of(store, "step", "group", "payload", "replay") == ["replay:state"]


async def test_all_lost_or_damaged_payloads_are_reported_at_once(store: Store) -> None:
    team = await start(store)
    await buffer(store, team, 3)
    names = [group.header.payload for group in await flow.oldest_groups(store, 3)]
    key = store.keys.payload(names[1])
    data = bytearray(await store.client.get(key) or b"")
    data[20] ^= 4  # flips a bit of a token, which is still a valid token
    await store.client.set(key, bytes(data))
    await store.client.set(store.keys.payload(names[2]), codec.seal(b"no message"))
    with pytest.raises(Damaged) as raised:
        await store.steps.payloads(["0-9.1", *names])
    assert {name: why[:14] for name, why in raised.value.reasons.items()} == {
        "0-9.1": "it is gone fro", names[1]: f"its {len(data)} bytes a"[:14], names[2]: "not a Payload:",
    }  # fmt: skip
    with pytest.raises(codec.CorruptMessage, match="checksum"):
        await store.inspection.payload(names[1])
    assert await store.inspection.payload("0-9.1") is None
    assert await store.steps.payloads([]) == {}


async def test_payload_bytes_round_trip(store: Store) -> None:
    team = await start(store)
    await buffer(store, team, 1)
    (group,) = await flow.oldest_groups(store, 1)
    raw = await store.client.get(store.keys.payload(group.header.payload))
    assert raw is not None
    assert codec.seal(codec.encode(codec.decode(codec.unseal(raw), Payload))) == raw
