"""The exact effect of weight changes and draws on clocks."""

from __future__ import annotations

import pytest

from services.store import Store
from tests.store.replay.tables import Entry, begin, check, fill, read
from tests.support import flow

LONG = 2.0**31


async def test_a_changed_weight_keeps_the_rest_of_the_variate(store: Store) -> None:
    team = await begin(store, "prioritized")
    one, two, three = await fill(store, team, [Entry(1.0, 3.0), Entry(0.0, 5.0), Entry(4.0, 2.0)])
    await store.replay.reweigh(team.trainer, {one: 2.0, two: 2.0, three: 0.0})
    table = await read(store)
    assert table.clock == {one: 1.5, two: 2.5}
    assert table.idle == {three: 2.0}
    check(table, 100_000, "prioritized", "fifo")


@pytest.mark.parametrize("heavy_first", [True, False])
async def test_clocks_far_ahead_restart_before_a_heavy_group_joins(store: Store, heavy_first: bool) -> None:
    """At such a time, rounding would affect the rings of a heavy group, but not those of a light one."""
    team = await begin(store, "prioritized")
    names = await fill(store, team, [Entry(1.0, 3.0), Entry(1.0, 4.0)])
    key = f"{store.keys.prefix}:replay:clock:3"
    for name in names:
        await store.client.zincrby(key, LONG, name)
    await store.client.hset(store.keys.replay_state, "now:3", str(LONG))
    weights = (8.0, 1.5) if heavy_first else (1.5, 8.0)
    await store.replay.reweigh(team.trainer, dict(zip(names, weights, strict=True)))
    table = await read(store)
    assert float(table.state["now:3"]) == 0.0
    assert [table.clock[name] for name in names] == [pytest.approx(3.0 / weights[0]), pytest.approx(4.0 / weights[1])]


async def test_weights_used_only_by_the_remover_change_no_clock(store: Store) -> None:
    for sampler in ("fifo", "uniform"):
        await store.client.flushall()
        team = await begin(store, sampler, "lowest_priority")
        [name] = await fill(store, team, [Entry(1.0, 3.0)])
        assert await store.replay.reweigh(team.trainer, {name: 1e6}) == 1
        table = await read(store)
        assert table.weight == {name: 1e6}
        assert table.clock == ({name: 3.0} if sampler == "uniform" else {})


async def test_rescaling_clips_weights_to_the_maximum(store: Store) -> None:
    team = await begin(store, "prioritized")
    names = await fill(store, team, [Entry(1e9), Entry(1.0)])
    while await store.replay.rescale(team.leader, 0, 1, 4.0):
        pass
    assert (await read(store)).weight == {names[0]: 1e9, names[1]: 4.0}


async def test_rescaling_a_table_without_weights_only_moves_the_base(store: Store) -> None:
    team = await begin(store, "uniform")
    await fill(store, team, [Entry(1.0, 3.0)])
    before = (await read(store)).clock
    assert await store.replay.rescale(team.leader, 0, 16, 2.0**-16) == 0
    assert await store.replay.recency_base() == 16
    assert (await read(store)).clock == before


async def test_simultaneous_rings_are_drawn_by_name(store: Store) -> None:
    team = await begin(store, "uniform")
    names = await fill(store, team, [Entry(1.0, 1.0)] * 40)
    drawn = [name for name, _ in (await store.replay.sweep_and_peek(team.leader, 0, 25)).first]
    assert drawn == sorted(names)[:25]


async def test_time_advances_to_the_last_ring_in_any_order_of_groups(store: Store) -> None:
    team = await begin(store, "prioritized")
    entries = [Entry(1.0, 1.0), Entry(1.0, 2.0), Entry(0.0, 3.0), Entry(0.0, 7.0), Entry(0.0, 9.0)]
    names = await fill(store, team, entries)
    drawn = [names[i] for i in (1, 3, 0, 2)]
    await store.steps.prepare(team.leader, *flow.plan(0, drawn), 0, [10.0] * 4)
    table = await read(store)
    assert float(table.state["now:3"]) == 2.0
    assert float(table.state["idle_now"]) == 7.0
    assert table.idle == {names[2]: 17.0, names[3]: 17.0, names[4]: 9.0}
