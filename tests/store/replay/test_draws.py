"""Draw probabilities of the clocks in Redis, against w / sum(w), by a two-sided chi-square test with fixed seeds."""

from __future__ import annotations

from collections import Counter

import numpy as np

from services.groups import replay_weights as replay
from services.store import Store
from tests.store.replay import tables
from tests.store.replay.draws import Bench, pearson
from tests.store.replay.tables import Entry, begin, fill, plausible
from tests.support import flow


def skewed(n: int, seed: int) -> np.ndarray:
    """Return weights that span four orders of magnitude."""
    return 10.0 ** np.random.default_rng(seed).uniform(-2, 2, n)


def independent(drawn: np.ndarray, weights: np.ndarray) -> float:
    """Return p of a test that consecutive draws are independent: chi-square over pairs of about equally likely classes."""
    order = np.argsort(weights)
    share = np.cumsum(weights[order]) / weights.sum()
    classes = np.empty(len(weights), int)
    classes[order] = np.minimum((share * 8).astype(int), 7)
    pairs = np.zeros((8, 8))
    np.add.at(pairs, (classes[drawn[:-1]], classes[drawn[1:]]), 1)
    pairs = pairs[pairs.sum(1) > 0][:, pairs.sum(0) > 0]
    expected = np.outer(pairs.sum(1), pairs.sum(0)) / pairs.sum()
    return tables.chi_square_p(float(((pairs - expected) ** 2 / expected).sum()), (len(pairs) - 1) ** 2)


async def test_single_draws_match_weights_and_are_independent(bench: Bench) -> None:
    weights = skewed(500, 1)
    await bench.insert(weights)
    drawn = (await bench.draws(100_000)).ravel()
    statistic, freedom = pearson(np.bincount(drawn, minlength=500), len(drawn) * weights / weights.sum())
    assert plausible(p := tables.chi_square_p(statistic, freedom)), (statistic, freedom, p)
    assert plausible(p := independent(drawn, weights)), p


async def test_draws_match_weights_that_change_between_them(bench: Bench) -> None:
    weights, random = skewed(500, 2), np.random.default_rng(2)
    await bench.insert(weights)
    statistic, freedom = 0.0, 0
    for _ in range(20):
        drawn = (await bench.draws(5_000)).ravel()
        more = pearson(np.bincount(drawn, minlength=500), len(drawn) * weights / weights.sum())
        statistic, freedom = statistic + more[0], freedom + more[1]
        changed = random.choice(500, 200, replace=False)
        weights[changed] = 10.0 ** random.uniform(-2, 2, 200) * random.choice([0, 1], 200, p=[0.1, 0.9])
        await bench.reweigh(weights)
    assert plausible(p := tables.chi_square_p(statistic, freedom)), (statistic, freedom, p)


async def test_uniform_draws_are_uniform(bench: Bench) -> None:
    await bench.store.client.hset(bench.store.keys.replay_state, "sampler", "uniform")  # type: ignore[misc]
    await bench.insert(np.ones(200))
    drawn = (await bench.draws(100_000)).ravel()
    statistic, freedom = pearson(np.bincount(drawn, minlength=200), np.full(200, 500.0))
    assert plausible(p := tables.chi_square_p(statistic, freedom)), (statistic, freedom, p)
    assert plausible(p := independent(drawn, np.ones(200))), p


async def test_a_step_is_an_exact_sample_without_replacement(bench: Bench) -> None:
    """It matches a naive simulation that draws one group after another from those left."""
    n, k, batches, simulated = 40, 12, 8_000, 40_000
    weights, random = 10.0 ** np.random.default_rng(4).uniform(-1, 1, n), np.random.default_rng(5)
    await bench.insert(weights)
    drawn = await bench.draws(batches * k, k)
    assert all(len(set(batch)) == k for batch in drawn.tolist())
    left, taken = np.tile(weights, (simulated, 1)), np.zeros((simulated, n))
    for _ in range(k):
        total = left.cumsum(1)
        chosen = (total < (random.random(simulated) * total[:, -1])[:, None]).sum(1)
        taken[np.arange(simulated), chosen], left[np.arange(simulated), chosen] = 1, 0
    seen = np.zeros((batches, n))
    np.put_along_axis(seen, drawn, 1, axis=1)
    apart = (seen.mean(0) - taken.mean(0))[1:]  # the columns sum to k, so one follows from the others
    covariance = np.cov(taken[:, 1:], rowvar=False) * (1 / batches + 1 / simulated)
    statistic = float(apart @ np.linalg.solve(covariance, apart))
    assert plausible(p := tables.chi_square_p(statistic, n - 1)), (statistic, p)
    heavy = int(weights.argmax())
    assert seen.mean(0)[heavy] < k * weights[heavy] / weights.sum(), "independent draws would include it more often"


async def test_zero_weights_are_drawn_last_and_uniformly(bench: Bench) -> None:
    await bench.insert([3.0, 0.5, *np.zeros(20)])
    drawn = await bench.draws(30_000, 3)
    assert {frozenset(batch) for batch in drawn[:, :2].tolist()} == {frozenset({0, 1})}
    statistic, freedom = pearson(np.bincount(drawn[:, 2], minlength=22)[2:], np.full(20, 500.0))
    assert plausible(p := tables.chi_square_p(statistic, freedom)), (statistic, p)
    await bench.reweigh(np.zeros(22))
    drawn = (await bench.draws(22_000)).ravel()
    statistic, freedom = pearson(np.bincount(drawn, minlength=22), np.full(22, 1000.0))
    assert plausible(p := tables.chi_square_p(statistic, freedom)), (statistic, p)
    await bench.reweigh([0.0] * 21 + [1e-9])
    assert set((await bench.draws(100)).ravel()) == {21}, "the lightest weight counts more than zero"


async def test_draws_through_sweep_and_prepare_match_weights(store: Store) -> None:
    """Uses the product's whole path and its own variates, which are hashes of each group's number of draws."""
    weights, steps = skewed(50, 6), 2_500
    team = await begin(store, "prioritized")
    names = [f"0-{i}" for i in range(50)]
    await fill(store, team, [Entry(float(w), replay.exponential(1, name, 0)) for name, w in zip(names, weights, strict=True)])
    uses: Counter[str] = Counter()
    first, second, expected = np.zeros(50), np.zeros(50), np.zeros(50)
    for step in range(steps):
        drawn = [name for name, _ in (await store.replay.sweep_and_peek(team.leader, 0, 2)).first]
        uses.update(drawn)
        variates = [replay.exponential(1, name, uses[name]) for name in drawn]
        await store.steps.prepare(team.leader, *flow.plan(step, drawn), 0, variates)
        one, other = (int(name[2:]) for name in drawn)
        first[one] += 1
        second[other] += 1
        rest = weights.copy()
        rest[one] = 0
        expected += rest / rest.sum()
    statistic, freedom = pearson(first, steps * weights / weights.sum())
    assert plausible(p := tables.chi_square_p(statistic, freedom)), (statistic, freedom, p)
    statistic, freedom = pearson(second, expected)
    assert tables.chi_square_p(statistic, freedom) > 0.001, (statistic, freedom)
    assert {group.group: group.uses for group in await flow.oldest_groups(store, 50)} == {name: uses[name] for name in names}
