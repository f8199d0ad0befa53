"""The fleet: heartbeats, members, and weight-sync rounds with their acknowledgements."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from services.protocol.errors import Fenced
from services.protocol.keys import TOPICS
from services.protocol.messages import PodStatus, Round
from services.runtime.loops import end_tasks
from services.store import Store, functions
from services.store.monitor import TopicSubscription
from tests.support.flow import claim, issue, settle, start, submit
from tests.support.harness import wait_until

LUA = Path(functions.__file__).parent


def pod(name: str, boot: str = "b1", **fields: object) -> PodStatus:
    given = {
        "kind": "generator", "name": name, "boot": boot, "host": "h", "pid": 1, "url": "", "phase": "ready", "version": 0,
        "world": 1, "gauges": {"tokens_per_s": 1.5},
    }  # fmt: skip
    return PodStatus(**{**given, **fields})  # type: ignore[arg-type]


def sync_round(attempt: int, phase: str = "gather") -> Round:
    return Round(attempt, 3, phase, {"g0:b1": 1}, 2, "gloo", "127.0.0.1", 1234, attempt, 1)


async def test_members_are_pods_with_a_recent_heartbeat(store: Store) -> None:
    await store.fleet.beat(pod("g0"), 10.0)
    await store.fleet.beat(pod("g1"), 10.0)
    assert sorted(status.name for status in await store.fleet.members(10.0)) == ["g0", "g1"]

    async def silent() -> bool:
        return await store.fleet.members(0.02) == []

    await wait_until(silent)
    await store.fleet.beat(pod("g1", phase="draining"), 10.0)
    assert pod("g1", phase="draining") in await store.fleet.members(10.0)


async def test_a_restarted_pod_replaces_its_former_member_at_once(store: Store) -> None:
    await store.fleet.beat(pod("g0", "b1"), 10.0)
    await store.fleet.beat(pod("g01", "b1"), 10.0)
    await store.fleet.beat(pod("g0", "b2"), 10.0)
    assert sorted(status.member for status in await store.fleet.members(10.0)) == ["g01:b1", "g0:b2"]


async def test_silent_members_are_forgotten(store: Store) -> None:
    await store.fleet.beat(pod("old"), 10.0)
    await asyncio.sleep(0.05)
    await store.fleet.beat(pod("new"), 0.001)
    assert await store.client.hkeys(store.keys.fleet_status) == [b"new:b1"]  # type: ignore[misc]


async def test_a_pod_that_leaves_keeps_its_open_leases(store: Store) -> None:
    team = await start(store)
    await issue(store, team, 1)
    assert len(await claim(store, "g0")) == 1
    await store.fleet.leave(pod("g0"))
    assert len(await claim(store, "g1", lease_s=0.0)) == 1
    await store.fleet.leave(pod("g0"))
    assert await consumers(store) == {"g1"}


async def consumers(store: Store) -> set[str]:
    return {each["name"].decode() for each in await store.client.xinfo_consumers(store.keys.tickets, "generators")}


async def test_no_consumer_is_left_of_a_pod_that_was_killed(store: Store) -> None:
    team = await start(store)
    await issue(store, team, 2)
    for name in ("killed", "idle"):
        await store.fleet.beat(pod(name), 10.0)
        await claim(store, name)
    assert await consumers(store) == {"killed", "idle"}
    await asyncio.sleep(0.05)
    await store.fleet.beat(pod("new"), 0.001)
    assert await consumers(store) == {"killed", "idle"}, "their leases still have to expire"
    assert len(await claim(store, "new", 1, lease_s=0.0)) == 1
    assert await consumers(store) == {"idle", "new"}
    assert len(await claim(store, "new", 2, lease_s=0.0)) == 2
    assert await consumers(store) == {"new"}
    await store.fleet.beat(pod("waiting"), 10.0)
    assert await claim(store, "waiting") == []
    assert await consumers(store) >= {"new"}  # a Redis from 7.2 on has a consumer that got nothing, too
    await asyncio.sleep(0.05)
    await store.fleet.beat(pod("new"), 0.001)
    assert await consumers(store) == {"new"}


async def test_acknowledgements_belong_to_one_attempt(store: Store) -> None:
    team = await start(store)
    assert await store.fleet.round() == (None, {})
    await store.fleet.set_round(team.trainer, sync_round(1))
    assert await store.fleet.acknowledge("g0:b1", 1, "ready", "paused with 3")
    await store.fleet.set_round(team.trainer, sync_round(1, "transfer"))
    assert await store.fleet.round() == (sync_round(1, "transfer"), {"g0:b1": ("ready", "paused with 3")})
    await store.fleet.set_round(team.trainer, sync_round(2))
    assert not await store.fleet.acknowledge("g0:b1", 1, "applied"), "the round is over"
    assert await store.fleet.round() == (sync_round(2), {})
    assert await store.fleet.acknowledge("g0:b1", 2, "ready")


async def test_a_member_reads_only_its_part_of_a_round(store: Store) -> None:
    team = await start(store)
    assert await store.fleet.round_of("g0:b1") is None
    await store.fleet.set_round(
        team.trainer, msgspec.structs.replace(sync_round(1), members={"g0:b1": 1, "g1:b1": 2}, trainer_fence=team.trainer)
    )
    mine = await store.fleet.round_of("g1:b1")
    assert mine is not None
    assert mine.members == {"g1:b1": 2}
    assert await store.fleet.round_of("g1:b1", mine) is mine, "nothing has changed"
    await store.fleet.set_round(team.trainer, msgspec.structs.replace(mine, phase="join", members={"g0:b1": 1}))
    left_out = await store.fleet.round_of("g1:b1", mine)
    assert left_out is not None
    assert (left_out.phase, left_out.members) == ("join", {})
    await store.client.hset(store.keys.sync, mapping={"mark": b"x", "round": b"\xff"})
    assert await store.fleet.round_of("g0:b1") is None, "malformed bytes do not stop the loop"


async def test_only_the_current_trainer_opens_rounds(store: Store) -> None:
    team = await start(store)
    await store.run.attach_trainer()
    with pytest.raises(Fenced):
        await store.fleet.set_round(team.trainer, sync_round(1))


@contextlib.asynccontextmanager
async def hearing(store: Store) -> AsyncIterator[list[str]]:
    """Subscribe to all topics; yield a list that grows with the topic of each notification."""
    heard: list[str] = []

    async def listen(notifications: TopicSubscription) -> None:
        async for topic in notifications:
            heard.append(topic)  # noqa: PERF401 - the list is read while it grows

    async with store.monitor.listening() as notifications:
        notifications.add(*TOPICS)
        task = asyncio.create_task(listen(notifications))
        await wait_until(lambda: set(heard) == set(TOPICS))  # each topic notifies once when its subscription begins
        heard.clear()
        try:
            yield heard
        finally:
            await end_tasks([task])


async def test_listeners_are_notified_of_changes(store: Store) -> None:
    async with hearing(store) as heard:
        team = await start(store)
        await issue(store, team, 1)
        await wait_until(lambda: {"control", "version", "tickets"} <= set(heard))


async def test_a_header_notifies_unless_others_wait_to_be_settled(store: Store) -> None:
    team = await start(store)
    await issue(store, team, 4)
    first, second, third, last = await claim(store, "g0", 4)
    async with hearing(store) as heard:
        assert await submit(store, "g0", first)
        await wait_until(lambda: heard == ["headers"])
        assert await submit(store, "g0", second)
        assert await submit(store, "g0", third)
        await settle(store, team)
        heard.clear()
        assert await submit(store, "g0", last)
        await wait_until(lambda: "headers" in heard)
        assert heard.count("headers") == 1


def test_the_topics_are_those_that_the_functions_notify_of() -> None:
    texts = [path.read_text() for path in LUA.glob("*.lua")]
    assert sorted({topic for text in texts for topic in re.findall(r"notify\(prefix, '(\w+)'\)", text)}) == list(TOPICS)


async def test_the_last_acknowledgement_of_a_phase_notifies(store: Store) -> None:
    team = await start(store)
    both = msgspec.structs.replace(sync_round(1), members={"g0:b1": 1, "g1:b1": 2})
    async with hearing(store) as heard:
        for number, (phase, stage) in enumerate([("gather", "present"), ("join", "joined")]):
            current = msgspec.structs.replace(both, phase=phase)
            await store.fleet.set_round(team.trainer, current)
            assert await store.fleet.acknowledge("g0:b1", 1, stage)
            await store.fleet.set_round(team.trainer, current)  # as after a lost reply; keeps the acknowledgements
            await wait_until(lambda number=number: heard.count("sync") == 2 * number + 2)
            assert heard.count("acks") == number, "one acknowledgement is missing"
            assert await store.fleet.acknowledge("g1:b1", 1, stage)
            await wait_until(lambda number=number: heard.count("acks") == number + 1)
