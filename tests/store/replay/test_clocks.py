"""Weights at their limits: recency over many versions, 18 orders of magnitude in one table, and invalid weights."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from msgspec.structs import replace

from services.groups import replay_weights as replay
from services.protocol.errors import StoreError
from services.store import Settlement
from services.store.snapshot_format import clock_key
from tests.store.replay import tables
from tests.store.replay.draws import Bench, pearson
from tests.store.replay.tables import Entry, fill


async def test_recency_halves_probability_per_version(bench: Bench) -> None:
    versions, base, new_base = np.repeat([10, 11, 12, 13], 25), 0, replay.recency_base(20)
    await bench.insert([replay.recency_weight(int(version) - base) for version in versions])
    for _ in range(2):
        drawn = versions[(await bench.draws(40_000)).ravel()]
        counts = np.array([(drawn == version).sum() for version in (10, 11, 12, 13)])
        statistic, _ = pearson(counts, len(drawn) * np.array([1, 2, 4, 8]) / 15)
        assert statistic < 16.3, (counts, statistic)  # p = 0.001 with three degrees of freedom
        factor = replay.recency_weight(base - new_base)
        assert await bench.store.replay.rescale(bench.team.leader, base, new_base, factor) in (0, 100)
    before = await tables.read(bench.store)
    assert await bench.store.replay.rescale(bench.team.leader, base, new_base, 0.5) == 0, "as after a lost reply"
    assert await tables.read(bench.store) == before
    tables.check(before, 100_000, "prioritized", "fifo")


async def test_weights_rescaled_to_zero_are_drawn_last(bench: Bench) -> None:
    await bench.insert([1.0, 1.0, 1e-6])
    for base in range(40):
        assert await bench.store.replay.rescale(bench.team.leader, base, base + 1, 2.0**-30) == 3
        tables.check(await tables.read(bench.store), 3, "prioritized", "fifo")
    table = await tables.read(bench.store)
    assert table.weight == {"0-0": 0.0, "0-1": 0.0, "0-2": 0.0}
    assert set((await bench.draws(300)).ravel()) == {0, 1, 2}


async def test_clocks_stay_precise_for_heavy_groups_after_light_ones(bench: Bench) -> None:
    """Drawing a weight of 1e-9 advances time by about 1e9, and a weight of 1e9 by 1e-9: a double cannot hold both."""
    light, heavy = np.full(10, 1e-9), np.full(10, 1e9)
    await bench.insert(light)
    for _ in range(3):
        await bench.draws(1_000)
        await bench.reweigh(heavy)
        drawn = (await bench.draws(20_000)).ravel()
        statistic, freedom = pearson(np.bincount(drawn, minlength=10), np.full(10, 2_000.0))
        assert tables.chi_square_p(statistic, freedom) > 1e-4, np.bincount(drawn, minlength=10)
        await bench.reweigh(light)
    await fill(bench.store, bench.team, [Entry(1e9, 1.0), Entry(1e9, 0.5), Entry(1e9, 2.0)])
    await bench.reweigh([*light, 1e9, 1e9, 1e9])
    first = (await bench.store.replay.sweep_and_peek(bench.team.leader, 0, 3)).first
    assert [name for name, _ in first] == ["0-11", "0-10", "0-12"]


async def test_time_stays_within_the_precision_of_a_double(bench: Bench) -> None:
    await bench.insert([1e9, 1.0, 1e-9])
    keys = bench.store.keys
    for number, name in ((4, "0-0"), (3, "0-1"), (1, "0-2")):  # as after a very long run
        await bench.store.client.hset(keys.replay_state, f"now:{number}", 1e30)  # type: ignore[misc]
        await bench.store.client.zadd(clock_key(keys, number), {name: 1e30})
    await bench.draws(3)
    state = (await tables.read(bench.store)).state
    assert max(float(state[f"now:{number}"]) for number in (4, 3, 1)) < 1e-2
    drawn = (await bench.draws(1000)).ravel()
    assert Counter(drawn.tolist()) == {0: 1000}


async def test_the_sum_of_weights_stays_exact_without_a_heavy_group(bench: Bench) -> None:
    weights = [1e-9, 3e-9, 1e9, 2.5e8, 0.1]
    await bench.insert(weights)
    for i in (2, 3, 4):
        await bench.reweigh([0.0 if 2 <= j <= i else w for j, w in enumerate(weights)])
        rest = math.fsum(w for j, w in enumerate(weights) if not 2 <= j <= i)
        assert (await bench.store.inspection.table_state()).weight_sum == pytest.approx(rest, rel=1e-12, abs=0.0)


async def _two_and_two_that_wait(bench: Bench) -> list[Settlement]:
    await bench.insert([1.0, 2.0])
    await tables.arrive(bench.store, bench.team, [0, 0])
    items = await bench.store.replay.read_headers(bench.team.leader, 2)
    return [Settlement(item, "insert") for item in items if item.header]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, -1e-300, 1.01e9])
async def test_a_batch_with_an_invalid_weight_is_rejected(bench: Bench, bad: float) -> None:
    """The table stays usable, unlike Reverb's, which hangs forever on one negative priority."""
    store, team = bench.store, bench.team
    good, other = await _two_and_two_that_wait(bench)
    before = await tables.read(store)
    with pytest.raises(StoreError, match=f"of group {other.item.ticket} is not in 0..1e9"):
        await store.replay.settle(team.leader, [good, replace(other, weight=bad)])
    assert await tables.read(store) == before
    assert await store.replay.settle(team.leader, [good, other]) == 2
    assert set((await bench.draws(200)).ravel()) == {0, 1, 2, 3}


@pytest.mark.parametrize("bad", ["nan", "-nan", "inf", "-1", "-1e-300", "1000000001", "1e400", "", "heavy", "1,5"])
async def test_one_invalid_weight_rejects_the_whole_update(bench: Bench, bad: str) -> None:
    store, team = bench.store, bench.team
    await bench.insert([1.0, 2.0])
    before = await tables.read(store)
    with pytest.raises(StoreError, match=r"of group 0-1 is not in 0\.\.1e9"):
        await store.connection.call("reweigh", team.trainer, 1, "0-0", "7", "0-1", bad)
    assert await tables.read(store) == before
    assert await store.replay.reweigh(team.trainer, {"0-0": 7.0}) == 1
    assert set((await bench.draws(200)).ravel()) == {0, 1}
