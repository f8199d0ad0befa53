"""A run whose prompts all fail pauses before they are used up, and generates them once they are requeued."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.config import RunConfig
from services.console.local.redis_server import RedisServer
from services.console.start.resumption import requeue_failed
from services.operations.inspection.deadletters import requeue
from services.store import Store
from tests.dataprep.test_loop import configured, dataprep, generate, train
from tests.support import flow

BROKEN = "verifier exact: KeyError: 'answer'"


async def fail(store: Store, most: int = 100) -> int:
    """Claim tickets and report each as failed for good. Returns how many."""
    _, claims = await store.tickets.claim("stand-in", 0, await flow.trainer_fence(store), 60, most)
    for claim in claims:
        assert await store.tickets.fail("stand-in", claim, BROKEN, 1)
    return len(claims)


async def publish(store: Store) -> None:
    await store.steps.publish(await store.run.attach_trainer(), 0)


@asynccontextmanager
async def leading(config: RunConfig) -> AsyncIterator[Store]:
    """Have dataprep lead a run whose first version is published, and delete the run in the end."""
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
        assert "16 in a row, the last one with: verifier exact: KeyError: 'answer'" in await failing(store)
        again = [each.ticket for each in (await requeue(store)).requeued]
        assert len(again) == failed
        await store.run.resume("dataprep")
        plans = await train(store, config.run.steps)
        assert set(again) <= {group for plan in plans for group in plan.groups}
        assert not await failing(store)


async def test_only_prompts_that_failed_in_a_row_are_generated_again(tmp_path: Path, server: RedisServer) -> None:
    """Prompts that fail whatever happens would otherwise come first when the run resumes, and pause it again."""
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
