"""A run whose prompts all fail pauses before it uses them up, and generates them once they are requeued."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.config import RunConfig
from services.console.run.redis_server import RedisServer
from services.console.run.resumption import requeue_failed
from services.dataprep.brakes import Failures
from services.operations.inspection.deadletters import requeue
from services.store import Store
from tests.dataprep.test_loop import configured, dataprep, generate, train
from tests.support import flow
from tests.support.harness import wait_until

BROKEN = "verifier exact: KeyError: 'answer'"


async def fail(store: Store, most: int = 100) -> int:
    """Claim tickets and let each fail permanently; return their number."""
    _, claims = await store.tickets.claim("stand-in", 0, await flow.trainer_fence(store), 60, most)
    for claim in claims:
        assert await store.tickets.fail("stand-in", claim, BROKEN, 1)
    return len(claims)


async def publish(store: Store) -> None:
    await store.steps.publish(await store.run.attach_trainer(), 0)


@asynccontextmanager
async def leading(config: RunConfig) -> AsyncIterator[Store]:
    """Let dataprep lead a run whose first version is published; delete the run at the end."""
    async with dataprep(config) as (service, loop):
        running = asyncio.create_task(service.run(loop.work))
        await publish(service.store)
        yield service.store
        service.stop()
        await running
        await service.store.restores.delete_run()


async def failing(store: Store) -> str:
    state = await store.run.state()
    return state.failing if state else ""


async def fail_until_paused(store: Store) -> int:
    count = 0
    async with asyncio.timeout(30):
        while not await failing(store):
            count += await fail(store, 4)
            await asyncio.sleep(0.05)
    return count + await fail(store)


async def test_a_run_whose_prompts_all_fail_pauses_and_trains_on_them_later(tmp_path: Path, server: RedisServer) -> None:
    config = configured(tmp_path, server)
    async with leading(config) as store:
        failed = await fail_until_paused(store)
        assert failed < 40, "some prompts are left"
        assert re.search(r"(1[6-9]|2\d) in a row, the last one with: verifier exact: KeyError: 'answer'", await failing(store))
        again = [each.ticket for each in (await requeue(store)).requeued]
        assert len(again) == failed
        await store.run.resume("dataprep")
        plans = await train(store, config.run.steps)
        assert set(again) <= {group for plan in plans for group in plan.groups}
        assert not await failing(store)


async def test_only_prompts_that_failed_in_a_row_are_generated_again(tmp_path: Path, server: RedisServer) -> None:
    """Otherwise prompts that always fail would come first when the run resumes, and would pause it again."""
    config = configured(tmp_path, server)
    async with leading(config) as store:
        async with asyncio.timeout(30):
            alone = 0
            while alone < 3:
                alone += await fail(store, 1)
                await asyncio.sleep(0.05)
            while not await generate(store, 0, 1):
                await asyncio.sleep(0.05)
            while await store.client.xlen(store.keys.headers):
                await asyncio.sleep(0.05)
        before = {letter.ticket for letter in await store.dead_letters.page(100)}
        in_a_row = await fail_until_paused(store)
        assert await requeue_failed(store, None) == in_a_row
        assert {letter.ticket for letter in await store.dead_letters.page(100)} == before
        assert (len(before), await store.run.failed()) == (3, 3)
        assert not await failing(store)


@asynccontextmanager
async def next_leader(config: RunConfig, name: str) -> AsyncIterator[Store]:
    """Let another pod lead the run, and stop it afterwards."""
    async with dataprep(config, name) as (service, loop):
        running = asyncio.create_task(service.run(loop.work))
        await wait_until(lambda: service.status.phase == "leading")
        yield service.store
        service.stop()
        await running


async def settled(store: Store) -> bool:
    return await store.client.xlen(store.keys.headers) == 0


async def issue_and_fail(store: Store, count: int) -> None:
    """Let `count` tickets fail, and wait for the leader's next turn."""
    async with asyncio.timeout(30):
        while count:
            count -= await fail(store, count)
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)  # longer than an idle turn


async def test_a_new_leader_continues_the_count_of_failures_in_a_row(tmp_path: Path, server: RedisServer) -> None:
    config = configured(tmp_path, server)
    async with next_leader(config, "dataprep-0") as store:
        await publish(store)
        await issue_and_fail(store, 2)
        assert await generate(store, 0, 1)
        await wait_until(lambda: settled(store))
        await issue_and_fail(store, 10)
        assert not await failing(store)
    async with next_leader(config, "dataprep-1") as store:
        await issue_and_fail(store, 5)
        assert not await failing(store), "those before the success do not count"
        await issue_and_fail(store, 1)
        await wait_until(lambda: failing(store))
        assert "16 in a row" in await failing(store)
    async with next_leader(config, "dataprep-2") as store:
        await store.run.resume("dataprep")
        await issue_and_fail(store, 15)
        assert not await failing(store), "those for which the run was paused do not pause it again"
    async with next_leader(config, "dataprep-3") as store:
        await issue_and_fail(store, 1)
        await wait_until(lambda: failing(store))
        assert "16 in a row" in await failing(store)
        await store.restores.delete_run()


async def test_a_leader_again_counts_only_failures_after_another_leaders_success(
    tmp_path: Path, server: RedisServer, store: Store
) -> None:
    team, failures = await flow.start(store, slots=64), Failures(store, configured(tmp_path, server))
    assert not await failures.pause()
    for count in (15, 0, 5):
        await flow.issue(store, team, count or 1)
        if count:
            assert await fail(store) == count
        else:
            (claim,) = await flow.claim(store, "stand-in")
            await flow.submit(store, "stand-in", claim, 0)
            assert await flow.settle(store, team) == 1
    failures.forget()
    failures.forget()
    assert not await failures.pause()
    await flow.issue(store, team, 11)
    await fail(store)
    assert await failures.pause()


async def test_a_success_between_failures_starts_their_count_again(tmp_path: Path, server: RedisServer) -> None:
    config = configured(tmp_path, server)
    async with leading(config) as store:
        failed = succeeded = 0
        async with asyncio.timeout(30):
            while failed < 24:
                failed += await fail(store, min(12, 24 - failed))
                succeeded += len(await generate(store, 0, 1))
                await asyncio.sleep(0.2)
        assert succeeded >= 2
        assert not await failing(store)


async def test_a_dataprep_that_dies_while_it_pauses_has_paused_for_good(store: Store) -> None:
    """It is killed before it gets the first reply."""
    team = await flow.start(store)
    await flow.issue(store, team, 1)
    await fail(store)
    (letter,) = await store.dead_letters.page()
    exchange = store.connection._exchange

    async def killed_after(commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        await exchange(commands)
        raise asyncio.CancelledError

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store.connection, "_exchange", killed_after)
        with pytest.raises(asyncio.CancelledError):
            await store.run.pause_failing("16 in a row", letter.id)
    assert await failing(store) == "16 in a row"
    assert await store.dead_letters.in_a_row(since_pause=True) == []
    assert await store.dead_letters.in_a_row() == [letter.id]
