"""The next step is fetched while this one trains: same rows, same errors, no waiting, nothing left over."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from services.console.run.redis_server import RedisServer
from services.protocol import codec
from services.protocol.errors import Damaged, StoreError
from services.protocol.messages import RankPlan, Sample, StepPlan
from services.runtime.portal import Portal
from services.store import Store
from services.trainer.step import batches
from services.trainer.step.batches import PackedRow
from services.trainer.step.prefetch import Fetched, Prefetch
from tests.support import flow
from tests.support.models.rank_worker import SlowStore, launch
from tests.support.models.tiny_model import VOCABULARY, make_payloads

DELAY_S = 0.3
STEPS, GROUPS = 4, 3  # groups of a step, the first for rank 0, the others for rank 1


def plan_of(step: int, groups: Sequence[str], payloads: Sequence[str]) -> tuple[StepPlan, list[RankPlan]]:
    """Return the plan of a step on two ranks."""
    samples = [[Sample(name, i, (-1) ** i * (1 + i / 2), 2) for i in range(flow.GROUP_SIZE)] for name in payloads]
    ranks = [RankPlan([samples[0], []]), RankPlan([samples[1], samples[2]])]
    tokens = 2.0 * flow.GROUP_SIZE * len(payloads)
    return StepPlan(step, list(groups), [], 2, 2, [2], [tokens], int(tokens), int(2 * tokens), {}), ranks


async def make_run(server: RedisServer, name: str, steps: int = STEPS) -> None:
    """Create a run with `steps` prepared steps."""
    store = await Store.connect(server.url, name, server.password)
    team = await flow.start(store, slots=STEPS * GROUPS)
    assert await flow.issue(store, team, STEPS * GROUPS) == STEPS * GROUPS
    claims = await flow.claim(store, "g", STEPS * GROUPS)
    for one, payload in zip(claims, make_payloads(STEPS * GROUPS, flow.GROUP_SIZE).values(), strict=True):
        fixed = msgspec.structs.replace(
            payload, lengths=np.full(flow.GROUP_SIZE, 2, np.int32), tokens=np.resize(payload.tokens, 8)
        )
        data = codec.encode(msgspec.structs.replace(fixed, logprobs=np.resize(payload.logprobs, 8)))
        assert await store.tickets.submit("g", one, flow.header(one), data, flow.TTL_S)
    await flow.settle(store, team)
    for step in range(steps):
        mine = claims[GROUPS * step : GROUPS * (step + 1)]
        plan, ranks = plan_of(step, [one.ticket_id for one in mine], [one.payload for one in mine])
        await store.steps.prepare(team.leader, plan, ranks)
    await store.close()


async def drop_run(server: RedisServer, name: str) -> None:
    store = await Store.connect(server.url, name, server.password)
    await store.restores.delete_run()
    await store.close()


@pytest.fixture
def run(server: RedisServer) -> Iterator[str]:
    name = f"t-{uuid.uuid4().hex[:12]}"
    asyncio.run(make_run(server, name))
    yield name
    asyncio.run(drop_run(server, name))


class Rig:
    """A prefetch of rank 1 on a store that delays payloads."""

    def __init__(self, server: RedisServer, name: str) -> None:
        self.portal = Portal()
        self.store: SlowStore = self.portal.call(SlowStore.connect(server.url, name, server.password))
        self.build = partial(batches.build, vocabulary=VOCABULARY, row_tokens=128)
        self.prefetch = Prefetch(self.portal, self.store, 1, self.build)

    def at_once(self, step: int) -> list[PackedRow]:
        """Return the rows of a step, built without prefetching."""
        plan = self.portal.call(self.store.steps.rank_plan(step, 1))
        return self.build(plan, self.portal.call(self.store.at_once(sorted({s.payload for r in plan.rows for s in r}))))

    def redis(self, command: str, *args: Any) -> Any:
        return self.portal.call(self.store.client.execute_command(command, *args))

    def step_key(self, step: int) -> str:
        return self.store.keys.step(step)

    def fetched(self) -> Fetched | None:
        """Return the prefetched step, if there is one."""
        ahead = self.prefetch._ahead
        return ahead.fetched if ahead else None

    def tasks(self) -> list[str]:
        return [task.get_name() for task in asyncio.all_tasks(self.portal.loop) if task.get_name().startswith("prefetch")]


@pytest.fixture
def rig(server: RedisServer, run: str) -> Iterator[Rig]:
    rig = Rig(server, run)
    yield rig
    rig.prefetch.close()
    assert rig.tasks() == []
    rig.portal.call(rig.store.close())
    rig.portal.close()


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def same(rows: list[PackedRow], others: list[PackedRow]) -> bool:
    """Return whether rows are bitwise equal."""
    if len(rows) != len(others):
        return False
    pairs = [(getattr(a, f.name), getattr(b, f.name)) for a, b in zip(rows, others, strict=True) for f in fields(PackedRow)]
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs if not isinstance(a, batches.Packing)
    ) and all(torch.equal(a.packing.sequences, b.packing.sequences) for a, b in zip(rows, others, strict=True))


def test_prefetched_rows_are_immediate_and_bitwise_equal(rig: Rig) -> None:
    rig.store.delay_s = DELAY_S
    first, ahead_s = rig.prefetch.take(0)
    assert ahead_s == 0
    assert first.seconds >= DELAY_S
    for step in range(1, STEPS):
        rig.prefetch.begin(step)
        until(rig.fetched)
        asked = rig.store.asked
        fetched, ahead_s = rig.prefetch.take(step)
        assert rig.store.asked == asked
        assert ahead_s == fetched.seconds >= DELAY_S
        assert fetched.plan.step == step
        assert same(fetched.rows, rig.at_once(step))
        assert rig.fetched() is None
    assert not same(first.rows, fetched.rows)


def test_a_fetch_in_progress_is_awaited_and_not_repeated(rig: Rig) -> None:
    rig.store.delay_s = DELAY_S
    rig.prefetch.begin(0)
    fetched, ahead_s = rig.prefetch.take(0)
    assert ahead_s == fetched.seconds
    assert rig.store.asked == 1


def test_an_unprepared_plan_is_found_when_its_step_begins(rig: Rig) -> None:
    whole = rig.redis("HGETALL", rig.step_key(2))
    flat = [part for pair in whole.items() for part in pair]
    for looks in (True, False):
        rig.redis("DEL", rig.step_key(2))
        rig.prefetch.begin(2)
        time.sleep(0.05)
        rig.redis("HSET", rig.step_key(2), *flat)
        if looks:
            until(rig.fetched)
        fetched, ahead_s = rig.prefetch.take(2)
        assert ahead_s > 0
        assert same(fetched.rows, rig.at_once(2))


def test_a_lost_plan_is_not_trained(rig: Rig) -> None:
    rig.prefetch.begin(1)
    until(rig.fetched)
    rig.redis("DEL", rig.step_key(1))
    with pytest.raises(StoreError, match="plan of step 1 is gone from Redis"):
        rig.prefetch.take(1)
    rig.prefetch.begin(1)
    with pytest.raises(StoreError, match="plan of step 1 is gone from Redis"):
        rig.prefetch.take(1)


def test_a_changed_plan_is_fetched_again(rig: Rig) -> None:
    rig.prefetch.begin(1)
    until(rig.fetched)
    for field in (b"rank:0", b"rank:1"):
        rig.redis("HSET", rig.step_key(1), field, rig.redis("HGET", rig.step_key(2), field))
    other = codec.decode(rig.redis("HGET", rig.step_key(2), "plan"), StepPlan)
    changed = StepPlan(**{name: getattr(other, name) for name in other.__struct_fields__} | {"step": 1})
    rig.redis("HSET", rig.step_key(1), "plan", codec.encode(changed))
    fetched, ahead_s = rig.prefetch.take(1)
    assert ahead_s == 0
    assert fetched.plan == changed
    assert same(fetched.rows, rig.at_once(2))


def test_an_early_failure_counts_only_if_it_persists(rig: Rig) -> None:
    key = next(k for k in rig.redis("KEYS", rig.store.keys.payload("0-4.*")))
    payload = rig.redis("GET", key)
    for back in (True, False):
        rig.redis("DEL", key)
        rig.prefetch.begin(1)
        until(lambda: rig.tasks() == [])
        if back:
            rig.redis("SET", key, payload)
            assert same(rig.prefetch.take(1)[0].rows, rig.at_once(1))
        else:
            with pytest.raises(Damaged, match=r"payload 0-4\.\d+: it is gone from Redis"):
                rig.prefetch.take(1)


def test_no_task_is_left_over(rig: Rig) -> None:
    rig.store.delay_s = 60
    rig.prefetch.begin(1)
    until(lambda: rig.store.asked)
    rig.store.delay_s = 0
    rig.prefetch.begin(2)  # the first is cancelled during its request
    assert rig.tasks() in (["prefetch 2"], [])
    assert same(rig.prefetch.take(3)[0].rows, rig.at_once(3))  # and so is a prefetch of another step
    assert rig.tasks() == []
    rig.redis("DEL", rig.step_key(1))
    rig.prefetch.begin(1)  # waits for a plan that never comes when the run is stopped
    assert rig.tasks() == ["prefetch 1"]
    rig.prefetch.close()
    assert rig.tasks() == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_train_prefetched_steps_like_any_other(server: RedisServer, tiny_model: Path, tmp_path: Path) -> None:
    """Two real ranks: no wait from the second step on, equal weights, and no rank trains what another cannot or does not."""
    names = [f"t-{uuid.uuid4().hex[:12]}" for _ in range(2)]
    for name in names:
        asyncio.run(make_run(server, name))
    asyncio.run(_damage_payloads_of_rank_1(server, names[1]))
    common = {"model": tiny_model, "url": server.url, "password": server.password, "steps": STEPS, "delay_s": DELAY_S}
    try:
        (whole, broken) = launch(
            2,
            [("through_worker", common | {"run": names[0], "lost_step": 2}), ("through_worker", common | {"run": names[1]})],
            tmp_path / "ranks",
        )
    finally:
        for name in names:
            asyncio.run(drop_run(server, name))
    for result in whole:
        assert result["problem"] == ""
        waits = [metrics["time/train/fetch_s"] for metrics in result["metrics"]]
        ahead = [metrics["time/train/prefetch_s"] for metrics in result["metrics"]]
        assert waits[0] >= DELAY_S
        assert ahead[0] == 0
        assert min(ahead[1], ahead[3]) >= DELAY_S
        assert (ahead[2], waits[2] >= DELAY_S) == (0, True), "both ranks fetched the step again, as rank 1 had another plan"
        assert result["damaged"] == []
        for gaps, metrics in zip(result["gaps"], result["metrics"], strict=True):
            assert [len(of_rank) for of_rank in gaps] == [flow.GROUP_SIZE, 2 * flow.GROUP_SIZE], "as planned for either rank"
            largest = max(np.abs(one).max() for of_rank in gaps for one in of_rank.values())
            assert largest == pytest.approx(metrics["logprob_gap/train/max"], rel=0.051)
    for result in broken:
        assert result["problem"] == ""
        gone, made_up = result["damaged"]
        assert "it is gone from Redis" in gone, "rank 0 learns what rank 1 found"
        assert "a behaviour logprob is 3e+38, outside the valid range" in made_up
        assert len(result["metrics"]) == STEPS
        tokens = [metrics["tokens/train/sum"] for metrics in result["metrics"]]
        assert tokens[2] == tokens[3] == tokens[1] - 2 * flow.GROUP_SIZE, "every rank trains the step without the group"
    for result in (*whole, *broken):
        assert all(torch.equal(value, result["at_once"][name]) for name, value in result["weights"].items())


async def _damage_payloads_of_rank_1(server: RedisServer, name: str) -> None:
    """Delete a payload of step 2, and put invalid behaviour logprobs into one of step 3."""
    store = await Store.connect(server.url, name, server.password)
    lost, made_up = [(await store.steps.rank_plan(step, 1)).rows[0][0].payload for step in (2, 3)]
    await store.client.delete(store.keys.payload(lost))
    payload = (await store.steps.payloads([made_up]))[made_up]
    absurd = msgspec.structs.replace(payload, logprobs=np.full_like(payload.logprobs, 3e38))
    await store.client.set(store.keys.payload(made_up), codec.seal(codec.encode(absurd)))
    await store.close()
