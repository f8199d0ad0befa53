"""Rounds that send patches, with Redis, the leader and members that follow: NCCL over gloo (tests/weights/nccl/nccl_wire.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from services.console.run.redis_server import RedisServer
from services.protocol.messages import Round
from services.weights.receiver import TransferFailed, WeightsChanged
from services.weights.sparse.sender import SparseWeightSender
from tests.support.rounds_world import World, open_world
from tests.support.scripted import ScriptedEngine
from tests.weights.test_broadcast_deltas import Tied, step_of_trained, trained
from tests.weights.versions.test_store_rounds import assert_equal

if TYPE_CHECKING:
    from tests.weights.sparse.plain_engine import PlainEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.filterwarnings("default")]  # importing vLLM warns


class PatchedEngine(ScriptedEngine):
    """Samples with the weights of a receiver over NCCL, like vLLM."""

    def __init__(self, receiver: PlainEngine) -> None:
        super().__init__()
        self.receiver, self.weights, self.stages = receiver, receiver.held, False

    async def join(self, round: Round, first_rank: int) -> None:
        place = (round.host, round.port, first_rank, round.world_size, self._config.sync.join_deadline_s)
        try:
            await asyncio.to_thread(self.receiver.join, *place)
        except (RuntimeError, TimeoutError) as error:
            raise TransferFailed(str(error)) from None

    async def receive(self, version: int) -> None:
        try:
            await asyncio.to_thread(self.receiver.take, self._config.sync.transfer_deadline_s)
        except (RuntimeError, TimeoutError) as error:
            self.whole = self.receiver.whole
            raise TransferFailed(str(error)) from None
        self.whole = self.receiver.whole
        if self.receiver.changed:
            raise WeightsChanged(self.receiver.changed)
        self.version = version


@pytest.fixture
def world(tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    from tests.weights.nccl import nccl_wire

    monkeypatch.setattr(nccl_wire, "LIMIT_S", 2.5)
    overrides = ("sync.backend=nccl", "sync.encoding=sparse")
    with nccl_wire.wired(), open_world(tmp_path, server, *overrides, model=Tied(), bucket_bytes=64 << 10) as world:
        yield world
        for engine in world.engines.values():
            assert isinstance(engine, PatchedEngine)
            engine.receiver.shutdown()


def join(world: World, name: str) -> str:
    """Add a member with weights of zero."""
    from tests.weights.sparse.plain_engine import PlainEngine

    weights = {name: weight.detach() for name, weight in world.model.named_parameters(remove_duplicate=False)}
    return world.member(name, PatchedEngine(PlainEngine(weights)))


def test_members_get_all_weights_first_and_patches_afterwards(world: World) -> None:
    join(world, "a")
    join(world, "b")
    assert [trained(world, version) for version in range(4)] == [False, True, True, True]
    assert 0.01 < world.sender.sent["changed"] < 0.03
    late = join(world, "late")
    report = world.rounds.catch_up(3)
    assert report is not None
    assert report.members == (late,)
    assert not world.sender.sent["delta"]
    assert_equal(world)
    assert trained(world, 4), "all hold version 3, whichever group delivered it"
    assert world.versions() == {"a": 4, "b": 4, "late": 4}


def test_a_member_that_missed_a_round_gets_all_weights(world: World) -> None:
    join(world, "a")
    join(world, "b")
    assert [trained(world, version) for version in range(2)] == [False, True]
    world.hold("b", 1)  # it is evaluating, and declines
    assert not trained(world, 2), "the group was torn down, so everything is sent"
    assert trained(world, 3)
    world.release("b")
    assert [trained(world, version) for version in (4, 5)] == [False, True]
    assert world.versions() == {"a": 5, "b": 5}


def test_a_damaged_patch_is_rejected_and_all_weights_follow(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    join(world, "a")
    assert not trained(world, 0)
    engine = world.engines["a"]
    before = {name: weight.clone() for name, weight in engine.weights.items()}
    honest = SparseWeightSender._collected

    def damaged(self: SparseWeightSender, *given: Any) -> Iterator[torch.Tensor]:
        for part in honest(self, *given):
            part[0] ^= 4  # the position of the first change
            yield part

    monkeypatch.setattr(SparseWeightSender, "_collected", damaged)
    seen: list[tuple[bool, dict[str, torch.Tensor]]] = []
    wait = world.rounds._wait
    between = lambda seconds: (seen.append((engine.whole, {n: w.clone() for n, w in engine.weights.items()})), wait(0.0))  # noqa: E731
    world.rounds._wait = lambda seconds, whole=False: between(seconds)[1]  # type: ignore[method-assign]
    step_of_trained(world, 1)
    assert world.train(1).attempts == 2
    assert not world.sender.sent["delta"]
    assert_equal(world)
    whole, held = seen[0]
    assert whole
    assert all(torch.equal(held[name], weight) for name, weight in before.items()), "existing weights must stay"
    monkeypatch.undo()
    assert trained(world, 2)


def test_a_member_with_changed_weights_reloads_all_of_them(world: World) -> None:
    join(world, "a")
    join(world, "b")
    assert [trained(world, version) for version in range(2)] == [False, True]
    broken = world.engines["b"]
    broken.weights["wide.weight"].neg_()
    step_of_trained(world, 2)
    assert world.train(2).members == ("a:boot",), "a has applied the patch that b rejected"
    assert_equal(world, "a")
    assert not broken.whole, "it must not sample"
    assert world.rounds.catch_up(2) is not None
    assert broken.whole
    assert_equal(world)
    assert not trained(world, 3), "the group has a worker that accepts no patches"
    assert world.versions() == {"a": 3, "b": 3}


def test_a_sender_that_fails_mid_patch_sends_all_weights(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    join(world, "a")
    assert not trained(world, 0)

    def breaking(self: SparseWeightSender, *given: Any) -> Iterator[torch.Tensor]:
        raise RuntimeError("the network is gone")
        yield

    monkeypatch.setattr(SparseWeightSender, "_collected", breaking)
    step_of_trained(world, 1)
    assert world.train(1).attempts == 2
    assert_equal(world)
    monkeypatch.undo()
    assert trained(world, 2)
