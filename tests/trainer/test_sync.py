"""Weight-sync rounds end to end: real Redis, real gloo groups, scripted engines as members, faults in every phase."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from services.console.redis_server import RedisServer
from services.generator.engine import EngineDead, TransferFailed
from services.generator.weights import WeightFollower
from services.protocol.config import RunConfig
from services.protocol.messages import PodStatus, Round
from services.protocol.store import Store
from services.runtime.bell import Bell
from services.runtime.loops import Broken, end_tasks
from services.runtime.portal import Portal
from services.runtime.service import Service
from services.trainer.sync import Alone, SyncRounds
from services.trainer.weights import WeightSender
from tests.harness import small_config, wait_until
from tests.scripted import ScriptedEngine

LIMITS = ("sync.join_deadline_s=2", "sync.transfer_deadline_s=3", "sync.host=127.0.0.1", "sync.backend=gloo")


@dataclass
class World:
    """The trainer's side, and members that follow its rounds on the portal's loop."""

    config: RunConfig
    portal: Portal
    store: Store
    sender: WeightSender
    rounds: SyncRounds
    engines: dict[str, ScriptedEngine] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def member(self, name: str, engine: ScriptedEngine | None = None, follows: bool = True) -> str:
        """Add a generator; one that does not follow answers nothing, like a stopped process whose heartbeat is still fresh."""
        self.engines[name] = engine or ScriptedEngine()

        async def join() -> str:
            status = PodStatus("generator", name, "boot", "here", 1, "", "unsynced", -1, 1, {})
            service = Service("generator", self.config, self.store, status)
            await self.engines[name].start(self.config)
            await self.store.beat(status, 60)
            if follows:
                follower = WeightFollower(service, self.engines[name])
                bodies = (service._listen, service._heartbeat, service.view.follow, follower.follow)
                loops = [service.add_loop(f"{name}-{i}", body) for i, body in enumerate(bodies)]
                self.tasks += [asyncio.create_task(loop.supervise()) for loop in loops]
            return status.member

        return self.portal.call(join())

    def versions(self) -> dict[str, int]:
        return {name: engine.version for name, engine in self.engines.items()}


@pytest.fixture
def world(tmp_path: Path, server: RedisServer) -> Iterator[World]:
    config = small_config(tmp_path, server, *LIMITS)
    portal = Portal()
    store = portal.call(Store.connect(server.url, "rounds", server.password))
    portal.call(store.create("config", "data", 4, 8))
    fence = portal.call(store.attach_trainer())
    bell = Bell()
    sender = WeightSender(config, torch.nn.Linear(8, 4), 0)
    listening = portal.start(bell.listen(store))
    rounds = SyncRounds(config, store, bell, portal, fence, sender, sender.send, lambda: None)
    world = World(config, portal, store, sender, rounds)
    yield world

    async def end() -> None:
        await end_tasks(world.tasks)
        listening.cancel()
        await asyncio.sleep(0)
        await store.delete_run()
        await store.close()

    sender.close_group()
    portal.call(end())
    portal.close()


def test_every_member_gets_the_version_and_the_group_stays(world: World) -> None:
    members = {world.member("a"), world.member("b")}
    first, second = world.rounds.run(0), world.rounds.run(1)
    assert world.versions() == {"a": 1, "b": 1}
    assert set(first.members) == set(second.members) == members
    assert (first.epoch, second.epoch, first.attempts, second.attempts) == (1, 1, 1, 1)


def test_a_latecomer_joins_under_a_new_epoch(world: World) -> None:
    world.member("a")
    first = world.rounds.run(0)
    world.member("b")
    second = world.rounds.run(1)
    assert world.versions() == {"a": 1, "b": 1}
    assert second.epoch > first.epoch


def test_only_those_behind_take_part_in_a_catch_up_round(world: World) -> None:
    world.member("a")
    world.rounds.run(0)
    late = world.member("b")
    report = world.rounds.catch_up(0)
    assert report is not None
    assert report.members == (late,)
    assert world.versions() == {"a": 0, "b": 0}
    assert world.rounds.catch_up(0) is None, "what a member acknowledged counts before its heartbeat says so"


def test_a_member_that_never_answers_is_left_out_within_its_deadline(world: World) -> None:
    alive = world.member("a")
    world.member("stopped", follows=False)
    report = world.rounds.run(0)
    assert report.members == (alive,)
    assert report.total_s < 2 * (2 + 3)


def test_a_member_that_is_gone_is_not_awaited(world: World) -> None:
    alive, gone = world.member("a"), world.member("b", follows=False)
    world.portal.call(world.store.beat(PodStatus("generator", "b", "next-boot", "here", 2, "", "loading", -1, 0, {}), 60))
    report = world.rounds.run(0)
    assert report.members == (alive,)
    assert gone not in report.members
    assert report.total_s < world.config.sync.join_deadline_s


class Breaking(ScriptedEngine):
    """Fails once in the phase it is told to."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self._phase = phase

    def _break(self, phase: str) -> None:
        if self._phase == phase:
            self._phase = ""
            raise TransferFailed(f"broken in {phase}")

    async def join(self, round: Round, first_rank: int) -> None:
        self._break("join")
        await super().join(round, first_rank)

    async def pause(self) -> None:
        self._break("pause")
        await super().pause()

    async def receive(self, version: int) -> None:
        self._break("transfer")
        await super().receive(version)


@pytest.mark.parametrize("phase", ["join", "pause", "transfer"])
def test_a_member_that_fails_is_out_of_the_round_and_back_in_the_next(world: World, phase: str) -> None:
    good = world.member("a")
    world.member("b", Breaking(phase))
    first = world.rounds.run(0)
    assert good in first.members
    second = world.rounds.run(1)
    assert world.versions() == {"a": 1, "b": 1}
    assert len(second.members) == 2
    assert all(engine._go.is_set() for engine in world.engines.values()), "somebody stayed paused"


def test_a_fleet_that_fails_as_a_whole_is_tried_again(world: World) -> None:
    world.member("a", Breaking("transfer"))
    report = world.rounds.run(0)
    assert world.versions() == {"a": 0}
    assert report.attempts == 2


def test_an_operators_pause_outlasts_a_round(world: World) -> None:
    world.member("a")
    world.portal.call(world.store.pause("generator", "a test"))

    world.portal.call(wait_until(lambda: not world.engines["a"]._go.is_set()))
    world.rounds.run(0)
    assert world.versions() == {"a": 0}
    assert not world.engines["a"]._go.is_set()
    world.portal.call(world.store.resume("generator"))

    world.portal.call(wait_until(world.engines["a"]._go.is_set))


def test_a_run_that_is_to_end_waits_for_no_generator(world: World) -> None:
    with pytest.raises(Alone):
        world.rounds.run(0, lambda: True)
    world.member("a")
    assert world.rounds.run(0, lambda: True).version == 0, "who is there is served, even at the end"


def test_an_engine_that_dies_in_a_pause_ends_its_process(world: World) -> None:
    class Stuck(ScriptedEngine):
        async def pause(self) -> None:
            raise EngineDead("did not answer")

    world.member("a", Stuck())
    world.portal.call(world.store.pause("generator", "a test"))

    async def ended() -> bool:
        return any(task.done() and isinstance(task.exception(), Broken) for task in world.tasks)

    world.portal.call(wait_until(ended))
