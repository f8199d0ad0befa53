"""Notifications and the view of a run, on a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest_asyncio

from services.protocol.keys import TOPICS
from services.runtime.loops import Loop, end_tasks
from services.runtime.notifications import Notifications
from services.runtime.view import RunView
from services.store import Store

LIMIT_S = 30.0  # on a busy machine; a wait that nothing wakes takes twice as long


async def _nothing(_: Loop) -> None: ...


def unwatched(name: str) -> Loop:
    return Loop(name, _nothing, limit_s=30.0)


@pytest_asyncio.fixture
async def notifications(store: Store) -> AsyncIterator[Notifications]:
    """Yield connected notifications."""
    notifications = Notifications()
    wait = asyncio.create_task(notifications.wait("control", timeout=60.0))
    await asyncio.sleep(0)
    listening = asyncio.create_task(notifications.listen(store))
    await wait  # a new connection wakes whatever waits for topics in Redis
    yield notifications
    await end_tasks([listening])


async def waited(notifications: Notifications, *topics: str, timeout: float = 60.0) -> float:
    started = time.monotonic()
    await notifications.wait(*topics, timeout=timeout)
    return time.monotonic() - started


async def test_a_change_in_redis_wakes_its_waiters(store: Store, notifications: Notifications) -> None:
    waiting = asyncio.create_task(waited(notifications, "control"))
    await asyncio.sleep(0.01)
    await store.run.create("config", "data", 4, 8)
    assert await waiting < LIMIT_S


async def test_a_notification_before_the_wait_is_not_lost(notifications: Notifications) -> None:
    while await waited(notifications, "tickets", "version", timeout=0.5) < 0.4:
        pass  # wait for the subscriptions
    notifications.notify("tickets")
    assert await waited(notifications, "tickets", "version") < LIMIT_S
    assert await waited(notifications, "tickets", "version", timeout=0.05) >= 0.04  # it wakes only one wait


async def test_a_notification_reaches_all_waiters_of_its_topic(notifications: Notifications) -> None:
    waiting = [asyncio.create_task(waited(notifications, "control", other)) for other in ("version", "tickets")]
    await asyncio.sleep(0)
    notifications.notify("control")
    assert max(await asyncio.gather(*waiting)) < LIMIT_S
    notifications.notify("control")
    assert await waited(notifications, "control", "version") < LIMIT_S
    assert await waited(notifications, "control", "tickets") < LIMIT_S


async def test_other_topics_do_not_wake(notifications: Notifications) -> None:
    await notifications.wait("tickets", timeout=60.0)
    notifications.notify("headers")
    assert await waited(notifications, "tickets", timeout=0.05) >= 0.04


async def test_only_topics_that_something_waits_for_are_received(store: Store, notifications: Notifications) -> None:
    received: list[str] = []
    notify = notifications.notify
    notifications.notify = lambda topic: (received.append(topic), notify(topic))[1]  # type: ignore[method-assign]
    await notifications.wait("tickets", timeout=60.0)  # returns at once: a notification may have come before
    assert received == ["tickets"]
    waiting = asyncio.create_task(waited(notifications, "tickets"))
    await asyncio.sleep(0.01)
    for topic in ("headers", "tickets", "control"):
        await store.client.publish(store.keys.notifications(topic), topic)
    assert await waiting < LIMIT_S
    assert "headers" not in received


async def test_topics_are_received_again_after_the_connection_broke(store: Store) -> None:
    notifications = Notifications()
    await notifications.wait("steps", timeout=0.01)
    for _ in range(2):
        listening = asyncio.create_task(notifications.listen(store))
        assert await waited(notifications, "steps") < LIMIT_S  # a new connection wakes all waiters
        waiting = asyncio.create_task(waited(notifications, "steps"))
        await asyncio.sleep(0.01)
        await store.client.publish(store.keys.notifications("steps"), "steps")
        assert await waiting < LIMIT_S
        await end_tasks([listening])


async def break_connections(store: Store) -> None:
    await store.client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")  # type: ignore[no-untyped-call]


async def test_a_connection_that_was_made_again_wakes_waiters(store: Store, notifications: Notifications) -> None:
    await notifications.wait("steps", timeout=60.0)
    waiting = asyncio.create_task(waited(notifications, "steps"))
    await asyncio.sleep(0.01)
    await break_connections(store)
    assert await waiting < LIMIT_S


async def test_topics_are_added_while_connections_break(store: Store) -> None:
    for number in range(30):
        notifications = Notifications()
        listening = asyncio.create_task(notifications.listen(store))
        await asyncio.sleep(0.01)
        waiting = []
        for topic in TOPICS:
            if len(waiting) % 4 == number % 4:
                await break_connections(store)
            waiting.append(asyncio.create_task(waited(notifications, topic)))
            await asyncio.sleep(0.001 * (number % 3))
        assert max(await asyncio.gather(*waiting)) < LIMIT_S
        assert not listening.done()
        await end_tasks([listening])


async def test_a_wait_cancelled_before_its_topic_is_subscribed_is_as_if_it_had_not_been(
    store: Store, notifications: Notifications
) -> None:
    waiting = asyncio.create_task(waited(notifications, "acks"))
    await asyncio.sleep(0)
    await end_tasks([waiting])
    assert await waited(notifications, "acks") < LIMIT_S
    waiting = asyncio.create_task(waited(notifications, "acks"))
    await asyncio.sleep(0.01)
    await store.client.publish(store.keys.notifications("acks"), "acks")
    assert await waiting < LIMIT_S


async def test_a_cancelled_wait_leaves_no_task_behind(notifications: Notifications) -> None:
    before = len(asyncio.all_tasks())
    waiting = asyncio.create_task(waited(notifications, "steps"))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == before


async def test_the_view_follows_the_run(store: Store, notifications: Notifications) -> None:
    view = RunView(store, notifications, "generator")
    assert (view.paused, view.ended) == (False, False)
    following = asyncio.create_task(view.follow(unwatched("view")))
    created = asyncio.create_task(view.created())
    await asyncio.sleep(0.01)
    await store.run.create("config", "data", 4, 8)
    assert (await asyncio.wait_for(created, 30.0)).slots == 8

    async def becomes(condition: object) -> None:
        async with view.changed:
            await asyncio.wait_for(view.changed.wait_for(condition), 30.0)  # type: ignore[arg-type]

    await store.run.pause("generator", "lunch")
    await becomes(lambda: view.paused)
    assert view.state is not None
    assert view.state.paused == {"generator": "lunch"}
    await store.run.resume("generator")
    await store.run.stop("enough")
    await becomes(lambda: not view.paused and view.state is not None and view.state.stopping == "enough")
    assert not view.ended  # a requested stop is not the end: the trainer still saves a checkpoint
    await store.run.finish("trained 4 of 4 steps")
    await becomes(lambda: view.ended)
    await end_tasks([following])
