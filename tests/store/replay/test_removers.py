"""A full table, group by group: it stays at capacity and evicts the right group, for every sampler and remover."""

from __future__ import annotations

import random

import pytest

from services.store import Store
from services.store.records import Settlement
from tests.store.replay import tables
from tests.store.replay.table_model import Model
from tests.store.replay.tables import Entry, begin, fill
from tests.support import flow
from tests.support.harness import ticket

CAPACITY = 5


@pytest.mark.parametrize("remover", tables.REMOVERS)
@pytest.mark.parametrize("sampler", tables.SAMPLERS)
async def test_a_table_offered_triple_its_capacity_stays_full(store: Store, sampler: str, remover: str) -> None:
    dice, model = random.Random(f"{sampler} {remover}"), Model(sampler, remover, CAPACITY, 3)
    team = await begin(store, sampler, remover, CAPACITY, 3)
    versions = [dice.randint(0, 5) for _ in range(3 * CAPACITY)]
    await tables.arrive(store, team, versions)
    drawn: list[str] = []
    items = await store.replay.read_headers(team.leader, 3 * CAPACITY)
    dice.shuffle(items)  # groups do not arrive in the order of issue
    for size, item in enumerate(items, 1):
        assert item.header is not None
        seq, oldest = item.header.seq, min(item.header.oldest)
        entry = Entry(dice.choice([0.0, 0.5, 2.0, 9.0]), dice.expovariate(1), oldest)
        settlement = Settlement(item, "insert", oldest, entry.weight, entry.variate)
        assert await store.replay.settle(team.leader, [settlement]) == 1
        model.insert(item.ticket, seq, entry)
        table = await tables.read(store)
        assert len(table.order) == min(size, CAPACITY)
        tables.check(table, CAPACITY, sampler, remover)
        model.check(table)
        if size == 2 * CAPACITY:  # from now on, some of the evicted groups have been trained on
            variates = [dice.expovariate(1) for _ in range(2)]
            drawn = await tables.draw(store, team, 2, variates)
            model.check_first(drawn, 2)
            model.prepare(drawn, variates)
    left = {name for name in drawn if name not in model.groups}
    assert set(table.departed) == left, "a checkpoint may still need these"
    assert table.audit["ledger:evicted"] + len(left) == 2 * CAPACITY


async def test_a_resubmitted_group_replaces_the_earlier_one(store: Store) -> None:
    team = await begin(store, "prioritized", capacity=3)
    await fill(store, team, [Entry(2.0, 0.1), Entry(3.0, 5.0), Entry(4.0, 6.0)])
    assert await tables.draw(store, team, 1, [9.0]) == ["0-0"]
    before = await tables.read(store)
    assert before.uses == {0: 2, 1: 1}
    for again in ("0-0", "0-1"):
        state = await store.run.state()
        assert state is not None
        await store.tickets.issue(team.leader, state.cursor, [ticket(state.cursor, id=again, index=int(again[2:]))])
        (claim,) = await flow.claim(store, "g")
        assert await flow.submit(store, "g", claim, oldest=7)
        assert await tables.settle(store, team, [Entry(5.0, 1.0)]) == 1
        assert await store.client.hget(store.keys.group(again), "payload") == claim.payload.encode()  # type: ignore[misc]
    table = await tables.read(store)
    tables.check(table, 3, "prioritized", "fifo")
    assert table.order == {"0-0": 3, "0-1": 4, "0-2": 2}
    assert table.weight == {"0-0": 5.0, "0-1": 5.0, "0-2": 4.0}
    assert table.uses == {0: 3}
    assert len([key async for key in store.client.scan_iter(match="*:payload:*")]) == 3


async def test_a_sweep_drops_any_number_of_stale_groups(store: Store) -> None:
    team = await begin(store, "uniform")
    await fill(store, team, [Entry(variate=i, oldest=0) for i in range(1, 701)])
    fresh = await fill(store, team, [Entry(variate=2000.0, oldest=1)])
    look = await store.replay.sweep_and_peek(team.leader, 1, 4)
    assert (look.stale, look.size, [name for name, _ in look.first]) == (700, 1, fresh)
    assert (await tables.read(store)).audit["ledger:stale"] == 700


async def test_gaps_are_reported_up_to_the_number_of_slots(store: Store) -> None:
    """A step passes over some of the gaps; the rest decide how many tickets may be issued."""
    team = await flow.start(store, slots=6)
    for _ in range(3):
        await flow.issue(store, team, 3)
        for claim in await flow.claim(store, "g", 3):
            assert await flow.submit(store, "g", claim)
        assert await flow.settle(store, team, "filtered:zero") == 3
    assert (await store.replay.sweep_and_peek(team.leader, 0, 2)).gaps == (0, 1, 2, 3, 4, 5)
    assert (await store.replay.sweep_and_peek(team.leader, 0, 2, 5)).gaps == (5, 6, 7, 8)
    await store.replay.pass_over(team.leader, 6)
    assert (await store.replay.sweep_and_peek(team.leader, 0, 2)).gaps == (7, 8)
