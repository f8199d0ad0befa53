"""A step without a group equals one planned without it, except for how its rows are packed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from services.console.run.redis_server import RedisServer
from services.dataprep.planning.plan import Layout, PlanGroup, plan_step
from services.dataprep.planning.step import make_step
from services.dataprep.replay.generated_statistics import GeneratedStats
from services.groups.group_statistics import DAMAGED
from services.protocol.errors import Damaged
from services.protocol.messages import RankPlan, Sample
from services.store import Store
from services.store.records import TableRules
from services.trainer.step.discard_damaged import discard_damaged, without
from tests.repeats.repeater import Journal, Repeater
from tests.support import flow
from tests.support.models.tiny_model import make_config


def group(name: str, seed: int) -> PlanGroup:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 20, 4)
    return PlanGroup(
        name, f"{name}.9", 3, lengths, random.standard_normal(4), np.arange(4) < 3, np.zeros(4, int), fresh=seed % 2 == 0
    )


def samples(ranks: list[RankPlan]) -> list[Sample]:
    return sorted(
        (sample for rank in ranks for row in rank.rows for sample in row), key=lambda sample: (sample.payload, sample.index)
    )


@pytest.mark.parametrize("denominator", ["token", "constant", "sequence", "group"])
def test_the_rest_equals_a_plan_of_the_remaining_groups(denominator: str) -> None:
    groups = [group(f"0-{i}", i) for i in range(6)]
    config = make_config(Path("m"), loss={"denominator": denominator}, sampling={"group_size": 7, "max_tokens": 11})
    layout = Layout(2, 64, denominator=config.loss.denominator, group_tokens=77)
    plan, ranks = plan_step(4, groups, layout, {"reward/train/mean": 0.5})
    changed, left = without(plan, ranks, {"0-1", "0-4"}, config)
    other, others = plan_step(4, [groups[i] for i in (0, 2, 3, 5)], layout)
    assert (changed.groups, changed.fresh_groups, changed.denominators) == (other.groups, other.fresh_groups, other.denominators)
    assert (changed.response_tokens, changed.total_tokens) == (other.response_tokens, other.total_tokens)
    assert samples(left) == samples(others)
    assert [len(rank.rows) for rank in left] == [plan.rows_per_rank] * 2
    assert changed.stats == {"reward/train/mean": 0.5, DAMAGED: 2.0}


def test_each_mini_batch_has_its_own_denominator_and_none_is_zero() -> None:
    groups = [group(f"0-{i}", i) for i in range(2)]
    plan, ranks = plan_step(0, groups, Layout(1, 200, mini_batches=2))
    changed, _ = without(plan, ranks, {"0-0"}, make_config(Path("m")))
    assert sorted(changed.denominators) == sorted([1.0, float(groups[1].lengths[:3].sum())])
    assert changed.mini_batch_rows == plan.mini_batch_rows
    nothing, left = without(changed, ranks, {"0-0", "0-1"}, make_config(Path("m")))
    assert (nothing.groups, nothing.denominators, nothing.total_tokens) == ([], [1.0, 1.0], 0)
    assert nothing.stats[DAMAGED] == 2
    assert samples(left) == []


async def losing_replies(store: Store, server: RedisServer) -> Store:
    """Connect another store to the run that sends every call twice and gets the second reply."""
    connection = await Repeater.connect(server.url, store.keys.name, server.password)
    connection.journal, connection.watched = Journal(at_once=True), store
    return Store(connection)


async def test_statistics_are_those_of_the_remaining_groups(store: Store, server: RedisServer) -> None:
    """Two steps have drawn the lost group; each ends with the counts that it would have had without it."""
    config = make_config(Path("unused"), replay={"sampler": "prioritized", "max_uses": 2, "importance_beta": 0.5})
    team = await flow.start(store, table=TableRules(max_uses=2))
    await flow.issue(store, team, 3)
    claims = await flow.claim(store, "g", 3)
    for number, one in enumerate(claims):
        rewards, lengths = [number / 4, 1.0, 0.0, 1.0], [number + 1, 2, 3, 40 * number + 4]
        header = flow.header(one, rewards=rewards, lengths=lengths, scores={"exact": rewards} if number else {})
        assert await store.tickets.submit("g", one, header, flow.payload_bytes(one), flow.TTL_S)
    await flow.settle(store, team)
    names, lost, expected = [one.ticket_id for one in claims], claims[2], []
    sweep_and_peek = replace(
        await store.replay.sweep_and_peek(team.leader, 0, 3),
        weights=dict(zip(names, (1.0, 2.0, 3.0), strict=True)),
    )
    for step in range(2):
        groups, made = await store.replay.groups(names), GeneratedStats(config.source_names)
        await store.steps.prepare(team.leader, *make_step(step, groups, sweep_and_peek, made, config), 0)
        expected.append(make_step(step, groups[:2], sweep_and_peek, made, config)[0])
    unlucky = await losing_replies(store, server)
    assert await discard_damaged(unlucky, team.trainer, 0, Damaged({lost.payload: "it is gone"}), config) == 1
    await unlucky.close()
    assert (await store.run.audit())["ledger:failed"] == 1
    for step in range(2):
        plan = await store.steps.plan(step)
        assert plan is not None
        assert plan.stats["replay/train/uses_mean"] == step
        stats = expected[step].stats
        emptier = (
            stats["rows/train/packed_ratio"] * expected[step].rows_per_rank / plan.rows_per_rank
        )  # its rows stay but are empty
        assert plan.stats == pytest.approx(stats | {DAMAGED: 1.0, "rows/train/packed_ratio": emptier}, abs=1e-12)
    assert (
        await discard_damaged(
            store, team.trainer, 1, Damaged(dict.fromkeys((one.payload for one in claims[:2]), "gone too")), config
        )
        == 2
    )
    plan = await store.steps.plan(1)
    assert plan is not None
    assert {name for name in plan.stats if "/train" in name} == {DAMAGED}
    assert plan.stats[DAMAGED] == 3
