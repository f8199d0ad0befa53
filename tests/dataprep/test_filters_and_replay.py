"""Dataprep's loop with filters, replay, exclusions and requeued dead letters: real Redis, fake generators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.console.run.redis_server import RedisServer
from services.dataprep.replay import admission
from services.operations.inspection.ledger import assess
from services.protocol.messages import StepPlan, Ticket
from services.store import Store
from tests.dataprep.test_loop import answer, configured, dataprep
from tests.support import flow
from tests.support.harness import wait_until

Rewards = Callable[[Ticket], list[float]]


class Run:
    """A running dataprep pod, with fake generators and a fake trainer that respond at once."""

    def __init__(self, store: Store, steps: int, rewards: Rewards) -> None:
        self.store, self.steps, self.rewards = store, steps, rewards
        self.tickets: list[Ticket] = []

    async def generate(self, version: int) -> None:
        _, claims = await self.store.tickets.claim("stand-in", version, await flow.trainer_fence(self.store), 60, 100)
        for claim in claims:
            assert claim.ticket is not None
            header, payload = answer(claim.ticket, claim, version)
            given = self.rewards(claim.ticket)
            header = msgspec.structs.replace(header, rewards=given, scores={"exact": given}, solved=[each == 1 for each in given])
            assert await self.store.tickets.submit("stand-in", claim, header, payload, 3600)
            self.tickets.append(claim.ticket)

    async def train(self) -> list[StepPlan]:
        """Train all steps, or fewer if the run ends; return their plans."""
        fence, plans = await self.store.run.attach_trainer(), []
        await self.store.steps.publish(fence, 0)
        for step in range(self.steps):
            async with asyncio.timeout(60):
                while (plan := await self.store.steps.plan(step)) is None:
                    state = await self.store.run.state()
                    if state is None or state.ended:
                        return plans
                    await self.generate(step)
                    await asyncio.sleep(0.005)
            plans.append(plan)
            await self.store.steps.commit(fence, step)
            await self.store.steps.publish(fence, step + 1)
        return plans


@asynccontextmanager
async def running(folder: Path, server: RedisServer, rewards: Rewards, *overrides: str) -> AsyncIterator[Run]:
    config = configured(folder, server, *overrides)
    async with dataprep(config) as (service, loop):
        task = asyncio.create_task(service.run(loop.work))
        try:
            yield Run(service.store, config.run.steps, rewards)
            report = assess("small", await service.store.run.audit())
            assert report.ok, report.messages
        finally:
            service.stop()
            await task
            await service.store.restores.delete_run()


def spread(ticket: Ticket) -> list[float]:
    return [1.0, 0.0, 1.0, 0.0]


def solved_if_even(ticket: Ticket) -> list[float]:
    return [1.0] * 4 if ticket.index % 2 == 0 else spread(ticket)


async def test_filtered_groups_are_replaced_by_other_prompts(tmp_path: Path, server: RedisServer) -> None:
    async with running(tmp_path, server, solved_if_even, "filters.zero_std=true") as run:
        plans = await run.train()
        assert [len(plan.groups) for plan in plans] == [8] * 4
        assert all(int(group.partition("-")[2]) % 2 for plan in plans for group in plan.groups)
        assert (await run.store.run.audit())["ledger:filtered:solved"] >= 8
        assert sum(plan.stats["filtered/solved/count"] for plan in plans) >= 8
        assert max(plan.stats["staleness/trained/max"] for plan in plans) <= 1


async def test_beyond_the_bound_filtered_groups_are_not_replaced(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "REPLACED_STEPS", 0)
    overrides = ("filters.zero_std=true", "data.curriculum=in_order")
    async with running(tmp_path, server, solved_if_even, *overrides) as run:
        plans = await run.train()
        assert [plan.groups for plan in plans] == [[f"0-{8 * step + i}" for i in (1, 3, 5, 7)] for step in range(4)]
        assert (await run.store.run.audit())["ledger:filtered:solved"] == 4 * 4


async def test_steps_with_nothing_to_learn_are_skipped(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "REPLACED_STEPS", 0)

    def rewards(ticket: Ticket) -> list[float]:
        return [0.0] * 4 if ticket.index < 20 else spread(ticket)

    overrides = ("filters.zero_std=true", "data.curriculum=in_order", "run.steps=2")
    async with running(tmp_path, server, rewards, *overrides) as run:
        plans = await run.train()
        assert [plan.groups for plan in plans] == [[f"0-{i}" for i in range(20, 24)], [f"0-{i}" for i in range(24, 32)]]
        assert (await run.store.run.audit())["ledger:filtered:zero"] == 20


async def test_a_solved_prompt_is_not_asked_in_later_epochs(tmp_path: Path, server: RedisServer) -> None:
    async with running(tmp_path, server, solved_if_even, "filters.exclude_pass_rate=0.9", "run.steps=9") as run:
        await run.train()
        asked = {epoch: {ticket.index for ticket in run.tickets if ticket.epoch == epoch} for epoch in (0, 1)}
        assert asked[0] == set(range(40))
        late = {ticket.index for ticket in run.tickets if ticket.epoch == 0 and ticket.seq >= 40 - 16}
        assert asked[1] <= set(range(1, 40, 2)) | late, "only rows certainly settled when the epoch began are dropped"
        assert len({(ticket.epoch, ticket.index) for ticket in run.tickets}) == len(run.tickets)


async def test_a_run_whose_prompts_are_all_solved_ends(tmp_path: Path, server: RedisServer) -> None:
    async with running(tmp_path, server, lambda ticket: [1.0] * 4, "filters.exclude_pass_rate=0.9", "run.steps=40") as run:
        plans = await run.train()
        assert 5 <= len(plans) < 40
        state = await run.store.run.state()
        assert state is not None
        assert "filters.exclude_pass_rate = 0.9" in state.stopping


@pytest.mark.parametrize("sampler", ["lifo", "freshest", "uniform", "prioritized"])
async def test_replayed_groups_replace_new_prompts(tmp_path: Path, server: RedisServer, sampler: str) -> None:
    overrides = (f"replay.sampler={sampler}", "replay.max_uses=3", "admission.max_staleness=3", "run.steps=12")
    async with running(tmp_path, server, spread, *overrides) as run:
        plans = await run.train()
        assert all(len(set(plan.groups)) == 8 for plan in plans)
        assert max(plan.stats["staleness/trained/max"] for plan in plans) <= 3
        uses = [group for plan in plans for group in plan.groups]
        assert max(map(uses.count, uses)) <= 3
        fresh = [group for plan in plans for group in plan.fresh_groups]
        assert len(fresh) == len(set(fresh)) == len(set(uses))
        assert len(run.tickets) < 12 * 8 * 0.75


async def test_importance_weights_reach_the_plan(tmp_path: Path, server: RedisServer) -> None:
    def similar_if_even(ticket: Ticket) -> list[float]:  # sums of |A|: 0.2 and 2
        return [0.5, 0.4, 0.5, 0.4] if ticket.index % 2 == 0 else spread(ticket)

    overrides = (
        "replay.sampler=prioritized", "replay.max_uses=2", "admission.max_staleness=3", "replay.importance_beta=1.0",
        "advantage.kind=centered", "run.steps=6",
    )  # fmt: skip
    async with running(tmp_path, server, similar_if_even, *overrides) as run:
        mixed = 0
        for plan in await run.train():
            rows = (await run.store.steps.rank_plan(plan.step, 0)).rows
            weights = {abs(sample.advantage) > 0.1: sample.weight for row in rows for sample in row}
            assert max(weights.values()) == 1.0
            assert plan.stats["replay/train/weight_min"] == min(weights.values())
            if len(weights) == 2:
                mixed += 1
                assert weights[True] == pytest.approx(0.1 * weights[False]), "N P is ten times as large"
        assert mixed


async def test_a_requeued_dead_letter_is_trained(tmp_path: Path, server: RedisServer) -> None:
    broken = {"0-3"}

    def rewards(ticket: Ticket) -> list[float]:
        return [float("nan")] * 4 if ticket.id in broken else spread(ticket)

    async with running(tmp_path, server, rewards, "data.curriculum=in_order", "run.steps=5", "admission.max_staleness=0") as run:
        store = run.store
        fence = await store.run.attach_trainer()
        await store.steps.publish(fence, 0)
        await wait_until(lambda: _has(store, "tickets", 8))
        await run.generate(0)
        await wait_until(lambda: _has(store, "ledger:failed", 1))
        broken.clear()
        letters = await store.dead_letters.page()
        (put_back,) = await store.dead_letters.requeue([letter.id for letter in letters])
        assert (put_back.ticket, put_back.refusal) == ("0-3", "")
        plans = await run.train()
        assert sum("0-3" in plan.groups for plan in plans) == 1
        audit = await store.run.audit()
        assert (audit.get("ledger:failed", 0), audit["requeued"]) == (0, 0)


async def _has(store: Store, name: str, count: int) -> bool:
    return (await store.run.audit()).get(name, 0) == count


async def test_a_lost_reply_of_issue_neither_repeats_nor_skips_prompts(tmp_path: Path, server: RedisServer) -> None:
    config = configured(tmp_path, server, "run.steps=5")
    async with dataprep(config) as (service, loop):
        issue, lost = service.store.tickets.issue, []

        async def twice(*args: Any, **named: Any) -> int:
            """Make a call twice, as the client does when the connection breaks before the reply."""
            if len(lost) < 2:
                lost.append(await issue(*args, **named))
            return await issue(*args, **named)

        service.store.tickets.issue = twice  # type: ignore[method-assign]
        task = asyncio.create_task(service.run(loop.work))
        run = Run(service.store, config.run.steps, spread)
        plans = await run.train()
        assert sum(lost) > 0
        assert sorted(int(group.partition("-")[2]) for plan in plans for group in plan.groups) == list(range(40))
        report = assess("small", await service.store.run.audit())
        assert report.ok, report.messages
        service.stop()
        await task
        await service.store.restores.delete_run()


async def test_headers_with_a_false_place_or_reward_do_no_harm(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "REPLACED_STEPS", 0)
    async with running(tmp_path, server, spread, "filters.zero_std=true") as run:
        store = run.store
        fence = await store.run.attach_trainer()
        await store.steps.publish(fence, 0)
        await wait_until(lambda: _has(store, "tickets", 16))
        _, claims = await store.tickets.claim("liar", 0, await flow.trainer_fence(store), 60, 3)
        lies = [{"seq": 2**63 - 1}, {"rewards": [1e308] * 4}, {"scores": {"mean": [0.5] * 3}}]
        for claim, lie in zip(claims, lies, strict=True):
            assert claim.ticket is not None
            header, payload = answer(claim.ticket, claim, 0)
            assert await store.tickets.submit("liar", claim, msgspec.structs.replace(header, **lie), payload, 3600)
        plans = await run.train()
        assert len(plans) == 4
        assert (await store.run.audit())["ledger:failed"] == 2
