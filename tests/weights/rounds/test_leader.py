"""Weight-sync rounds end to end: real Redis, real gloo groups, scripted engines as members, faults in every phase."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from services.console.run.redis_server import RedisServer
from services.protocol.messages import PodStatus, Round
from services.runtime.loops import Broken, Fatal
from services.weights.broadcast.gloo import GlooReceiver, GlooSender
from services.weights.deadline import Deadline
from services.weights.receiver import EngineDead, TransferFailed
from services.weights.rounds import leader
from services.weights.rounds.leader import Alone
from services.weights.transport import Address, SendFailed
from tests.support.harness import small_config, wait_until
from tests.support.rounds_world import World, open_world
from tests.support.scripted import ScriptedEngine
from tests.support.senders import sender_of


@pytest.fixture
def world(tmp_path: Path, server: RedisServer) -> Iterator[World]:
    with open_world(tmp_path, server) as world:
        yield world


@pytest.fixture
def hasty(tmp_path: Path, server: RedisServer) -> Iterator[World]:
    """Yield a world with short deadlines, for tests that wait for them."""
    with open_world(tmp_path, server, "sync.deadline_s=4") as world:
        yield world


def test_every_member_gets_the_version_and_the_group_is_kept(world: World) -> None:
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


def test_only_outdated_members_take_part_in_a_catch_up_round(world: World) -> None:
    world.member("a")
    world.rounds.run(0)
    late = world.member("b")
    report = world.rounds.catch_up(0)
    assert report is not None
    assert report.members == (late,)
    assert world.versions() == {"a": 0, "b": 0}
    assert world.rounds.catch_up(0) is None, "an acknowledgement counts before the next heartbeat"


def test_an_unresponsive_member_is_excluded_at_its_deadline(tmp_path: Path, server: RedisServer) -> None:
    with open_world(tmp_path, server, "sync.deadline_s=4", "fleet.ttl_s=60") as world:  # only the deadline ends the wait
        alive = world.member("a")
        world.member("stopped", follows=False)
        report = world.rounds.run(0)
    assert report.members == (alive,)
    assert 4 <= report.total_s < 6


def test_a_lost_member_is_not_awaited(world: World) -> None:
    alive, gone = world.member("a"), world.member("b", follows=False)
    world.portal.call(world.store.fleet.beat(PodStatus("generator", "b", "next-boot", "here", 2, "", "loading", -1, 0, {}), 60))
    report = world.rounds.run(0)
    assert report.members == (alive,)
    assert gone not in report.members
    assert report.total_s < world.config.sync.answer_s


def status(name: str, unreached: str = "") -> PodStatus:
    return PodStatus("generator", name, "boot", "here", 1, "", "unsynced", -1, 1, {}, unreached=unreached)


def test_an_unreachable_member_returns_when_it_reports_a_route(hasty: World) -> None:
    world = hasty
    alive = world.member("a")
    cut = world.member("b", follows=False)
    world.portal.call(world.store.fleet.beat(status("b", unreached="here:1"), 60))
    first = world.rounds.run(0)
    assert (first.members, first.attempts) == ((alive,), 1)
    assert world.rounds.catch_up(0) is None, "it does not join a catch-up round either"
    assert cut not in world.gathered
    world.portal.call(world.store.fleet.beat(status("b"), 60))
    assert world.rounds.run(1).members == (alive,)
    assert cut in world.gathered


def test_if_no_member_reaches_the_trainer_all_are_tried_again(world: World) -> None:
    member = world.member("a")
    world.portal.call(world.store.fleet.beat(status("a", unreached="here:1"), 60))
    assert world.rounds.run(0).members == (member,)


def test_a_member_reports_whether_it_reaches_the_trainer(hasty: World) -> None:
    world = hasty
    member = world.member("a")

    def opened(phase: str, members: dict[str, int]) -> Round:
        return Round(0, 0, phase, members, 0, "gloo", "127.0.0.1", port, 7, world.fence)

    async def unreached() -> str:
        return next(pod.unreached for pod in await world.store.fleet.members(60) if pod.member == member)

    async def acknowledged() -> tuple[str, str] | None:
        return (await world.store.fleet.round())[1].get(member)

    async def tell(listener: socket.socket) -> None:
        await world.store.fleet.set_round(world.fence, opened("gather", {member: 0}))
        await wait_until(acknowledged)
        assert await acknowledged() == (
            "failed",
            f"cannot reach the trainer at 127.0.0.1:{port} within 2 s: check sync.host, name service and network policies",
        )
        assert await unreached() == f"127.0.0.1:{port}", "its heartbeat reported it before it answered"
        listener.listen()
        await world.store.fleet.set_round(world.fence, opened("done", {}))

        async def again() -> bool:
            return not await unreached()

        await wait_until(again)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]  # nothing listens yet
        world.portal.call(tell(listener))


class Breaking(ScriptedEngine):
    """Fails once in the given phase."""

    def __init__(self, phase: str, stages: bool = True) -> None:
        super().__init__()
        self._phase, self.stages = phase, stages

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


@pytest.mark.parametrize("stages", [True, False])
@pytest.mark.parametrize("phase", ["join", "pause", "transfer"])
def test_a_failed_member_misses_only_that_round(world: World, phase: str, stages: bool) -> None:
    good = world.member("a")
    world.member("b", Breaking(phase, stages))
    first = world.rounds.run(0)
    assert good in first.members
    second = world.rounds.run(1)
    assert world.versions() == {"a": 1, "b": 1}
    assert len(second.members) == 2
    assert all(engine.go.is_set() for engine in world.engines.values()), "some member stayed paused"


def test_a_fleet_that_fails_as_a_whole_is_retried(world: World) -> None:
    world.member("a", Breaking("transfer"))
    report = world.rounds.run(0)
    assert world.versions() == {"a": 0}
    assert report.attempts == 2


def test_a_fault_of_the_trainers_own_is_retried_once_a_second(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.member("a")
    world.rounds.run(0)
    attempts, began, merged = list[float](), time.monotonic(), GlooSender.merge

    def full(sender: GlooSender, weights: Any) -> torch.Tensor:
        attempts.append(time.monotonic() - began)
        if len(attempts) < 4:
            raise torch.OutOfMemoryError("no memory for a merged weight")
        return merged(sender, weights)

    monkeypatch.setattr(GlooSender, "merge", full)
    world.rounds.run(1)
    assert world.versions() == {"a": 1}
    rests = [after - before for before, after in pairwise(attempts[:4])]
    assert min(rests) >= leader.RETRY_PAUSE_S, "the members' answers to a failed attempt do not hasten the next"


def test_a_lost_device_ends_the_trainer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.member("a")
    world.rounds.run(0)

    def lost(*_: Any) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(GlooSender, "merge", lost)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        world.rounds.run(1)


class Flipping(ScriptedEngine):
    """A faulty machine: in each of the next `faults` transfers, one bit of a bucket changes after it has arrived."""

    def __init__(self, faults: int) -> None:
        super().__init__()
        self.faults = faults

    async def join(self, round: Round, first_rank: int) -> None:
        await super().join(round, first_rank)
        self._group = self.connection.group
        self.connection = self.connection._replace(group=self)

    def broadcast(self, buffers: list[torch.Tensor], options: object) -> Any:
        work = self._group.broadcast(buffers, options)
        work.wait()
        if self.faults and buffers[0].ndim == 1:
            self.faults -= 1
            buffers[0][9] ^= 4
        return work


def test_corrupted_weights_are_not_applied_and_are_resent(world: World) -> None:
    good, bad = world.member("a"), world.member("b", Flipping(0))
    world.rounds.run(0)
    before = world.engines["b"].weights["weight"].clone()
    world.engines["b"].faults = 1  # type: ignore[attr-defined]
    with torch.no_grad():
        world.model.weight += 1
    report = world.rounds.run(1)
    assert report.members == (good,)
    assert world.versions() == {"a": 1, "b": 0}
    assert torch.equal(world.engines["b"].weights["weight"], before)
    assert world.portal.call(world.store.fleet.round())[1][bad] == ("failed", "corrupted in transfer: weight")
    report = world.rounds.catch_up(1)
    assert report is not None
    assert report.members == (bad,)
    for engine in world.engines.values():
        assert torch.equal(engine.weights["weight"], world.model.weight)
        assert engine.go.is_set(), "some member stayed paused"


def test_two_corrupted_transfers_in_a_row_end_the_run(world: World) -> None:
    world.member("a")
    world.member("b", Flipping(2))
    world.rounds.run(0)
    with pytest.raises(Fatal, match=r"'weight' was corrupted in two consecutive transfers, .* at b:boot"):
        world.rounds.run(1)
    assert world.versions() == {"a": 1, "b": -1}


def test_corrupted_transfers_that_are_not_in_a_row_end_nothing(world: World) -> None:
    world.member("a", Flipping(1))
    world.rounds.run(0)
    world.engines["a"].faults = 1  # type: ignore[attr-defined]
    assert world.rounds.run(1).attempts == 2
    assert world.versions() == {"a": 1}


@pytest.mark.parametrize("stages", [True, False])
def test_a_staging_engine_samples_while_receiving(world: World, stages: bool) -> None:
    sampled: list[bool] = []

    class Watched(ScriptedEngine):
        async def stage(self, version: int, limit_s: float | None = None) -> None:
            sampled.append(self.go.is_set())
            await super().stage(version, limit_s)

        async def receive(self, version: int) -> None:
            assert not self.go.is_set(), "weights must be applied in a pause"
            await super().receive(version)

    engine = Watched()
    engine.stages = stages
    world.member("a", engine)
    world.rounds.run(0)
    assert sampled == [stages]
    assert world.versions() == {"a": 0}


def test_a_declining_member_costs_no_deadline(world: World) -> None:
    trains = world.member("a")
    world.member("b")
    world.rounds.run(0)
    world.hold("b", 0)  # it is evaluating, but its heartbeat has not yet reported that
    first, second = world.rounds.run(1), world.rounds.run(2)
    assert first.members == second.members == (trains,)
    assert world.versions() == {"a": 2, "b": 0}
    assert first.total_s + second.total_s < world.config.sync.answer_s
    world.release("b")
    assert len(world.rounds.run(3).members) == 2, "a member declines one round, not later ones"
    assert all(engine.go.is_set() for engine in world.engines.values()), "some member stayed paused"


def test_an_operators_pause_outlasts_a_round(world: World) -> None:
    world.member("a")
    world.portal.call(world.store.run.pause("generator", "a test"))

    world.portal.call(wait_until(lambda: not world.engines["a"].go.is_set()))
    world.rounds.run(0)
    assert world.versions() == {"a": 0}
    assert not world.engines["a"].go.is_set()
    world.portal.call(world.store.run.resume("generator"))

    world.portal.call(wait_until(world.engines["a"].go.is_set))


def test_an_ending_run_waits_for_no_generator(world: World) -> None:
    with pytest.raises(Alone):
        world.rounds.run(0, lambda: True)
    world.member("a")
    assert world.rounds.run(0, lambda: True).version == 0, "present members are served, even at the end"


def test_an_engine_that_dies_during_a_pause_ends_its_process(world: World) -> None:
    class Stuck(ScriptedEngine):
        async def pause(self) -> None:
            raise EngineDead("did not answer")

    world.member("a", Stuck())
    world.portal.call(world.store.run.pause("generator", "a test"))

    async def ended() -> bool:
        return any(task.done() and isinstance(task.exception(), Broken) for task in world.tasks["a"])

    world.portal.call(wait_until(ended))


def test_a_member_that_dies_in_mid_broadcast_is_noticed_at_once(tmp_path: Path) -> None:
    """It is noticed before the deadline: the sender closes its end of the group, whatever the error's traceback refers to."""
    config = small_config(tmp_path, None, "sync.backend=gloo", "sync.host=127.0.0.1")
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    sender = sender_of(config, model, bucket_bytes=1 << 20)
    host, port = sender.open(1)
    heard: list[BaseException] = []

    def member(rank: int) -> None:
        receiver = GlooReceiver(torch.device("cpu"))
        connection = receiver.connect(Address(host, port, rank, 3, 1 << 20, 20), rank)
        if rank == 2:
            return  # its connections end like those of a killed process
        try:
            receiver.take(connection, 0, Deadline(100))
        except RuntimeError as error:
            heard.append(error)

    members = [threading.Thread(target=member, args=(rank,)) for rank in (1, 2)]
    for thread in members:
        thread.start()
    gc.disable()  # a collection would end the group eventually, too
    try:
        sender.connect(3)
        with pytest.raises(SendFailed):
            sender.send(0, 1)
        for thread in members:
            thread.join(30)
    finally:
        gc.enable()
    assert len(heard) == 1
