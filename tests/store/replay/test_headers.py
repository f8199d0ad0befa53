"""Settling: every finished group is inserted or gets its outcome exactly once, and the table never exceeds its capacity."""

from __future__ import annotations

import pytest

from services.protocol.errors import Fenced
from services.store import Settlement, Store
from services.store.records import TableRules
from tests.support import flow
from tests.support.flow import buffer, claim, counts, header, issue, payload_bytes, prepare, settle, start, submit
from tests.support.harness import buried


async def finished(store: Store, team: flow.Team, count: int) -> list[str]:
    """Submit `count` groups; return the names of their payloads."""
    await issue(store, team, count)
    claims = await claim(store, "g", count)
    for one in claims:
        assert await submit(store, "g", one)
    return [one.payload for one in claims]


async def stored(store: Store) -> int:
    """Return the number of payloads in Redis."""
    return len([key async for key in store.client.scan_iter(match="*:payload:*")])


async def test_headers_are_returned_until_settled(store: Store) -> None:
    team = await start(store)
    payloads = await finished(store, team, 3)
    for _ in range(2):  # a leader that dies between reading and settling loses nothing
        items = await store.replay.read_headers(team.leader, 2)
        assert [item.payload for item in items] == payloads[:2]
    assert [item.payload for item in await store.replay.read_headers(team.leader, 5)] == payloads


async def test_inserted_groups_are_kept_in_order_of_issue(store: Store) -> None:
    team = await start(store)
    await issue(store, team, 3)
    for one in reversed(await claim(store, "g", 3)):
        assert await submit(store, "g", one)
    assert await settle(store, team) == 3
    table = await flow.oldest_groups(store, 10)
    assert [(g.group, g.uses, g.header.ticket) for g in table] == [(f"0-{i}", 0, f"0-{i}") for i in range(3)]
    assert [g.group for g in await flow.oldest_groups(store, 2)] == ["0-0", "0-1"]
    assert (await store.replay.sweep_and_peek(team.leader, 0, 5)).oldest_outstanding == -1


async def test_a_repeated_settlement_changes_nothing(store: Store) -> None:
    team = await start(store)
    await finished(store, team, 2)
    items = await store.replay.read_headers(team.leader, 10)
    settlements = [Settlement(item, "stale") for item in items]
    assert await store.replay.settle(team.leader, settlements) == 2
    before = await store.run.audit()
    assert await store.replay.settle(team.leader, settlements) == 0
    assert await store.run.audit() == before
    assert (before["slots_used"], before["ledger:stale"]) == (0, 2)


@pytest.mark.parametrize("action", ["stale", "filtered:zero", "failed:rewards are not finite"])
async def test_a_dropped_group_is_counted_and_frees_slot_and_payload(store: Store, action: str) -> None:
    team = await start(store)
    await finished(store, team, 1)
    assert await settle(store, team, action) == 1
    outcome = "failed" if action.startswith("failed") else action
    assert await counts(store) == {"ledger:issued": 1, f"ledger:{outcome}": 1, "ledger:syncs": 1}
    assert await stored(store) == 0
    assert await buried(store) == ([("0-0", "rewards are not finite")] if outcome == "failed" else [])


async def test_a_full_table_evicts_its_oldest_groups(store: Store) -> None:
    team = await start(store, slots=12, table=TableRules(capacity=4))
    for _ in range(4):
        await finished(store, team, 3)
        await settle(store, team)
        assert (await store.run.audit())["buffered"] <= 4
    assert [g.group for g in await flow.oldest_groups(store, 100)] == ["0-8", "0-9", "0-10", "0-11"]
    assert await counts(store) == {
        "buffered": 4, "slots_used": 4, "ledger:issued": 12, "ledger:evicted": 8, "ledger:syncs": 1,
    }  # fmt: skip
    assert await stored(store) == 4


async def test_evicting_a_trained_group_is_not_a_second_outcome(store: Store) -> None:
    """Its payload stays until a checkpoint covers the step that used it."""
    team = await start(store, table=TableRules(capacity=2, max_uses=2))
    await buffer(store, team, 2)
    await prepare(store, team, 0, ["0-0"])
    await finished(store, team, 1)
    assert await settle(store, team) == 1
    audit = await counts(store)
    assert "ledger:evicted" not in audit
    assert (audit["prepared"], audit["buffered"], audit["slots_used"]) == (1, 2, 3)
    assert await stored(store) == 3


async def test_corrupt_and_contradictory_headers_are_detected(store: Store) -> None:
    team = await start(store)
    await issue(store, team, 3)
    a, b, c = await claim(store, "g", 3)
    for one, wrong in ((a, {"ticket": "0-7"}), (b, {"payload": "0-1.1"})):
        assert await store.tickets.submit("g", one, header(one, **wrong), payload_bytes(one), flow.TTL_S)
    await store.client.xadd(store.keys.headers, {"ticket": "0-2", "payload": c.payload, "body": b"\xc1"})
    items = await store.replay.read_headers(team.leader, 10)
    assert [item.header for item in items] == [None] * 3
    assert "names ticket 0-7" in items[0].fault
    assert "payload 0-1.1" in items[1].fault
    assert await settle(store, team) == 3
    audit = await store.run.audit()
    assert (audit["ledger:failed"], audit["slots_used"]) == (3, 0)


async def test_a_header_of_an_unknown_ticket_is_dead_lettered(store: Store) -> None:
    team = await start(store)
    await store.client.xadd(store.keys.headers, {"ticket": "9-9", "payload": "9-9.1", "body": b"?"})
    await store.client.xadd(store.keys.headers, {"nonsense": "1"})
    assert await settle(store, team) == 2
    assert await counts(store) == {"ledger:unknown_headers": 2, "ledger:syncs": 1}
    assert len(await buried(store)) == 2


async def test_a_superseded_leader_neither_reads_nor_settles(store: Store) -> None:
    team = await start(store)
    await finished(store, team, 1)
    items = await store.replay.read_headers(team.leader, 1)
    await store.run.step_down("leader-0:boot")
    new = await store.run.lead("leader-1:boot", 60.0)
    assert new is not None
    with pytest.raises(Fenced):
        await store.replay.settle(team.leader, [Settlement(items[0], "stale")])
    with pytest.raises(Fenced):
        await store.replay.read_headers(team.leader, 1)
    assert [item.entry for item in await store.replay.read_headers(new, 1)] == [items[0].entry], "its successor finds the header"


async def test_stale_groups_are_dropped_once_by_the_next_sweep(store: Store) -> None:
    team = await start(store)
    for version in (0, 1, 2):
        await buffer(store, team, 1, oldest=version)
    look = await store.replay.sweep_and_peek(team.leader, 2, 5)
    assert (look.stale, look.size, look.first) == (2, 1, (("0-2", 2),))
    assert (await store.replay.sweep_and_peek(team.leader, 2, 5)).stale == 0, "as after a lost reply"
    assert await counts(store) == {
        "buffered": 1, "slots_used": 1, "ledger:issued": 3, "ledger:stale": 2, "ledger:syncs": 1,
    }  # fmt: skip
    assert await stored(store) == 1
    await store.run.step_down("leader-0:boot")
    assert await store.run.lead("leader-1:boot", 60.0)
    with pytest.raises(Fenced):
        await store.replay.sweep_and_peek(team.leader, 9, 5)
