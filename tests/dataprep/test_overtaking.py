"""A step overtakes an older ticket only after time in which the ticket could have ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.console.run.redis_server import RedisServer
from services.dataprep.replay import admission
from tests.dataprep.test_loop import _has, claim_all, configured, dataprep, finish, generate
from tests.support.harness import wait_until

DEADLINE_S = 1.5


@pytest.mark.parametrize("roles", [(), ("generator",), ("dataprep", "trainer", "generator")], ids=["none", "generator", "all"])
async def test_a_pause_does_not_count_as_time_waited(
    roles: tuple[str, ...], tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "OVERTAKE_S", DEADLINE_S)
    config = configured(tmp_path, server)
    async with dataprep(config) as (service, loop):
        store = service.store
        running = asyncio.create_task(service.run(loop.work))
        fence, claims = await claim_all(store)
        held = claims[8]  # the first of step 1
        for claim in claims:
            if claim is not held:
                await finish(store, claim, 0)
        await wait_until(lambda: store.steps.plan(0))
        await store.steps.commit(fence, 0)
        await store.steps.publish(fence, 1)
        await wait_until(lambda: _has(store, "tickets", 9))  # with `held`
        await generate(store, 1)  # step 1 waits only for `held`
        await wait_until(lambda: loop._waiting[0] == "older_ticket")
        if roles:
            for role in roles:
                await store.run.pause(role, "lunch")
            await asyncio.sleep(DEADLINE_S + 0.5)
            for role in roles:
                await store.run.resume(role)
            await asyncio.sleep(0.3)  # time for several turns
            assert await store.steps.plan(1) is None
            await finish(store, held, 0)
        await wait_until(lambda: store.steps.plan(1))
        plan = await store.steps.plan(1)
        assert plan is not None
        assert (held.ticket_id in plan.groups) == bool(roles)
        service.stop()
        await running
        await store.restores.delete_run()
