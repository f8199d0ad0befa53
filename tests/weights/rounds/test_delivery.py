"""Weights that are sent while the trainer continues to train: real Redis, real gloo groups, scripted engines as members."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.console.run.redis_server import RedisServer
from services.protocol.errors import StoreError
from services.runtime.notifications import Notifications
from services.weights.receiver import TransferFailed
from services.weights.rounds.delivery import DELIVERED, Delivery
from services.weights.rounds.leader import Alone, Stopped
from tests.support.rounds_world import World, open_world
from tests.support.scripted import ScriptedEngine


class SlowEngine(ScriptedEngine):
    """Holds what it has received until a test lets it apply it; fails the next `refusals` updates."""

    def __init__(self, refusals: int = 0) -> None:
        super().__init__()
        self.apply, self.refusals = threading.Event(), refusals

    async def receive(self, version: int) -> None:
        await asyncio.to_thread(self.apply.wait, 20)
        if self.refusals:
            self.refusals -= 1
            raise TransferFailed("not this time")
        await super().receive(version)


class Sending:
    """A delivery in a world, and what it has published."""

    def __init__(self, world: World) -> None:
        self.world, self.ticks = world, 0
        self.stop = False
        self.delivery = Delivery(world.rounds, self.tick)

    @property
    def published(self) -> int:
        state = self.world.portal.call(self.world.store.run.state())
        return -1 if state is None else state.published_version

    def tick(self) -> None:
        self.ticks += 1
        if self.stop:
            raise Stopped

    def begin(self, version: int) -> None:
        self.delivery.begin(version, lambda: False)


@pytest.fixture
def sending(tmp_path: Path, server: RedisServer) -> Iterator[Sending]:
    with open_world(tmp_path, server) as world:
        sending = Sending(world)
        yield sending
        for engine in world.engines.values():
            if isinstance(engine, SlowEngine):
                engine.apply.set()
        sending.delivery.close()


def test_a_version_is_published_once_members_have_applied_it_and_not_awaited_before(sending: Sending) -> None:
    engine = SlowEngine()
    member = sending.world.member("a", engine)
    sending.begin(0)
    assert (sending.delivery.pending, sending.delivery.done, sending.published) == (True, False, -1)
    engine.apply.set()
    notifications: Notifications = sending.world.rounds.notifications
    sending.world.portal.call(notifications.wait(DELIVERED, timeout=20))
    assert (sending.delivery.pending, sending.delivery.done, sending.published) == (True, True, 0)
    report = sending.delivery.finish()
    assert report is not None
    assert (report.version, report.members, report.attempts) == (0, (member,), 1)
    assert not sending.delivery.pending
    assert sending.delivery.finish() is None, "nothing was sent since"


def test_finish_waits_and_ticks(sending: Sending) -> None:
    engine = SlowEngine()
    sending.world.member("a", engine)
    sending.begin(0)
    threading.Timer(0.3, engine.apply.set).start()
    assert sending.delivery.finish() is not None
    assert sending.ticks >= 1
    assert sending.world.versions() == {"a": 0}


def test_weights_that_nobody_applied_are_not_sent_again_by_finish(sending: Sending) -> None:
    """The trainer has continued, so it no longer has them; the next version replaces them."""
    engine = SlowEngine(refusals=1)
    sending.world.member("a", engine)
    engine.apply.set()
    sending.begin(0)
    assert sending.delivery.finish() is None
    assert (sending.published, sending.world.versions()) == (-1, {"a": -1})
    sending.begin(0)
    assert sending.delivery.finish() is not None
    assert sending.published == 0


def test_weights_that_nobody_applied_are_sent_again_while_the_trainer_has_them(sending: Sending) -> None:
    engine = SlowEngine(refusals=1)
    sending.world.member("a", engine)
    engine.apply.set()
    sending.begin(0)
    report = sending.delivery.finish_or_repeat(lambda: False)
    assert report is not None
    assert (report.version, report.attempts) == (0, 2)
    assert (sending.published, sending.world.versions()) == (0, {"a": 0})
    assert sending.delivery.finish_or_repeat(lambda: False) is None, "nothing was sent since"


def test_they_are_not_sent_again_when_the_run_ends(sending: Sending) -> None:
    engine = SlowEngine(refusals=1)
    sending.world.member("a", engine)
    engine.apply.set()
    sending.begin(0)
    with pytest.raises(Alone):
        sending.delivery.finish_or_repeat(lambda: True)
    assert not sending.delivery.pending


def test_what_fails_in_the_thread_is_raised_by_finish(sending: Sending, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(fence: int, version: int) -> None:
        raise StoreError("Redis is gone")

    monkeypatch.setattr(sending.world.store.steps, "publish", fail)
    sending.world.member("a")
    sending.begin(0)
    with pytest.raises(StoreError, match="Redis is gone"):
        sending.delivery.finish()
    assert not sending.delivery.pending


def test_a_version_whose_commit_redis_lost_is_not_published(sending: Sending) -> None:
    """A server restarts without its last second of writes while generators apply the weights: the trainer repeats both."""
    sending.world.member("a")
    sending.begin(3)  # contains steps that are not committed
    assert sending.delivery.finish() is not None
    assert (sending.published, sending.world.versions()) == (-1, {"a": 3})


def test_a_trainer_that_stops_does_not_wait_for_members(sending: Sending) -> None:
    engine = SlowEngine()
    sending.world.member("a", engine)
    sending.begin(0)
    sending.stop = True
    with pytest.raises(Stopped):
        sending.delivery.finish()
    began = time.monotonic()
    sending.delivery.close()
    assert time.monotonic() - began < 5
    assert sending.published == -1
