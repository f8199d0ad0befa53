"""Entries of Redis that no service of the run wrote stop neither settling nor issuing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from services.console.run.redis_server import RedisServer
from services.protocol import codec
from tests.dataprep.test_loop import _has, answer, claim_all, configured, dataprep, finish
from tests.support.harness import buried, wait_until


@pytest.mark.parametrize(("epoch", "row"), [(0, -5), (0, 10**17), (10**9, 0)])
async def test_a_header_of_an_impossible_row_goes_to_the_dead_letters(
    epoch: int, row: int, tmp_path: Path, server: RedisServer
) -> None:
    async with dataprep(configured(tmp_path, server, "filters.exclude_pass_rate=0.9")) as (service, loop):
        store = service.store
        running = asyncio.create_task(service.run(loop.work))
        _, claims = await claim_all(store)
        assert claims[0].ticket is not None
        header, _ = answer(claims[0].ticket, claims[0], 0)
        name, solved = f"{epoch}-{row}", [True] * len(header.rewards)
        bad = replace(header, ticket=name, epoch=epoch, index=row, solved=solved, payload=f"{name}.1")
        await store.client.xadd(store.keys.headers, {"ticket": name, "payload": bad.payload, "body": codec.encode(bad)})
        for claim in claims:
            await finish(store, claim, 0)
        await wait_until(lambda: store.steps.plan(0))
        assert await buried(store) == [(name, f"epoch {epoch} and row {row} are impossible")]
        service.stop()
        await running
        await store.restores.delete_run()


async def test_a_requeued_ticket_of_a_row_that_does_not_exist_is_issued_empty(tmp_path: Path, server: RedisServer) -> None:
    """It then fails where it is claimed, and the others go on."""
    async with dataprep(configured(tmp_path, server)) as (service, loop):
        store = service.store
        running = asyncio.create_task(service.run(loop.work))
        fence, claims = await claim_all(store)
        letter = {"ticket": "0-999999", "reason": "foreign", "body": "", "outcome": "failed"}
        entry = await store.client.xadd(store.keys.deadletter, letter)
        (requeued,) = await store.dead_letters.requeue([entry.decode()])
        assert requeued.refusal == ""
        for claim in claims:
            await finish(store, claim, 0)
        await wait_until(lambda: store.steps.plan(0))
        await store.steps.commit(fence, 0)
        await store.steps.publish(fence, 1)
        await wait_until(lambda: _has(store, "tickets", 8))
        _, issued = await store.tickets.claim("stand-in", 1, fence, 60, 100)
        prompts = {claim.ticket_id: claim.ticket.prompt for claim in issued if claim.ticket}
        assert prompts.pop("0-999999") == []
        assert len(prompts) == 7
        assert all(prompts.values())
        service.stop()
        await running
        await store.restores.delete_run()
