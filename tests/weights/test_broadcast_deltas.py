"""Rounds over `gloo` and `filesystem` that send deltas: exact, only to members with the base, and all weights after a fault."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.console.run.redis_server import RedisServer
from services.weights import transports
from services.weights.collective import Deadline
from services.weights.encoding_choice import TRY_AGAIN, EncodingChoice
from services.weights.versions import broadcast
from services.weights.versions.broadcast import BroadcastEncoder, EncodedDelta, Heading
from services.weights.versions.mirror import NOTHING, WeightMirror
from services.weights.versions.positions import InvalidVersion
from tests.support.rounds_world import World, open_world
from tests.weights.versions.test_store_rounds import assert_equal, step

SIZE = 256
BUCKET = 64 << 10


class Tied(torch.nn.Module):
    """Two layers, a head tied to the first one's weight, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(SIZE, SIZE, dtype=torch.bfloat16)
        self.wide = torch.nn.Linear(SIZE, 2 * SIZE, dtype=torch.float32)
        self.head = torch.nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.body.weight
        self.still = torch.nn.Parameter(torch.randn(SIZE), requires_grad=False)


@pytest.fixture(params=["gloo", "filesystem"])
def world(request: pytest.FixtureRequest, tmp_path: Path, server: RedisServer) -> Iterator[World]:
    overrides = ("sync.encoding=delta", f"sync.backend={request.param}", f"sync.folder={tmp_path}/volume")
    with open_world(
        tmp_path, server, *overrides[: 3 if request.param == "filesystem" else 2], model=Tied(), bucket_bytes=BUCKET
    ) as w:
        yield w


def trained(world: World, version: int) -> bool:
    """Train and send a version; return whether it was sent as a delta."""
    step_of_trained(world, version)
    world.train(version)
    assert_equal(world, *[name for name, engine in world.engines.items() if engine.version == version])
    for engine in world.engines.values():
        if engine.version == version:
            assert torch.equal(engine.weights["head.weight"], engine.weights["body.weight"]), "a tied weight has both names"
    return bool(world.sender.sent["delta"])


def step_of_trained(world: World, seed: int) -> None:
    """Change about a fiftieth of the trained weights."""
    still = {name: weight.detach().clone() for name, weight in world.model.named_parameters() if not weight.requires_grad}
    step(world, seed)
    with torch.no_grad():
        for name, weight in still.items():
            world.model.get_parameter(name).copy_(weight)


def test_members_get_all_weights_first_and_deltas_afterwards(world: World) -> None:
    members = {world.member("a"), world.member("b")}
    assert [trained(world, version) for version in range(4)] == [False, True, True, True]
    assert world.sender.sent["share"] < 0.1
    assert 0.01 < world.sender.sent["changed"] < 0.03
    assert set(world.rounds.run(4).members) == members
    assert world.sender.sent["changed"] == 0, "nothing changed"
    assert_equal(world)


def test_a_newcomer_gets_all_weights_alone_and_then_deltas(world: World) -> None:
    world.member("a")
    assert [trained(world, version) for version in range(2)] == [False, True]
    late = world.member("late")
    report = world.rounds.catch_up(1)
    assert report is not None
    assert report.members == (late,)
    assert not world.sender.sent["delta"]
    assert_equal(world)
    assert trained(world, 2), "all hold version 1, whichever group delivered it"


def test_a_newcomer_not_caught_up_costs_one_full_round(world: World) -> None:
    world.member("a")
    assert [trained(world, version) for version in range(2)] == [False, True]
    world.member("late")
    assert [trained(world, version) for version in (2, 3)] == [False, True]


def test_a_member_that_leaves_costs_nothing(world: World) -> None:
    world.member("a")
    world.member("gone")
    assert not trained(world, 0)
    world.kill("gone")

    async def forget() -> None:
        await world.store.client.delete(world.store.keys.fleet)

    world.portal.call(forget())
    assert trained(world, 1), "the others still hold the base"


def test_a_member_that_missed_a_round_gets_all_weights(world: World) -> None:
    world.member("a")
    world.member("b")
    assert not trained(world, 0)
    world.hold("b", 0)  # it is evaluating, and declines
    assert not trained(world, 1), "the group was torn down, so everything is sent"
    assert trained(world, 2)
    world.release("b")
    assert not trained(world, 3)
    assert trained(world, 4)
    assert world.versions() == {"a": 4, "b": 4}


def test_a_damaged_delta_is_rejected_and_all_weights_follow(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.member("a")
    assert not trained(world, 0)
    engine = world.engines["a"]
    before = {name: weight.clone() for name, weight in engine.weights.items()}
    honest = BroadcastEncoder.encode
    made: list[EncodedDelta] = []

    def damaging(self: BroadcastEncoder, *given: Any) -> EncodedDelta:
        delta = honest(self, *given)
        delta.payload[-1] ^= 1  # the last byte of the data
        made.append(delta)
        return delta

    monkeypatch.setattr(BroadcastEncoder, "encode", damaging)
    seen: list[dict[str, torch.Tensor]] = []
    wait = world.rounds._wait
    world.rounds._wait = lambda seconds, whole=False: (seen.append(dict(engine.weights)), wait(0.0))[1]  # type: ignore[method-assign]
    step_of_trained(world, 1)
    report = world.train(1)
    assert report.attempts == 2
    assert len(made) == 1
    assert not world.sender.sent["delta"]
    assert seen, "the member was excluded from the remaining attempts"
    assert all(torch.equal(weight, seen[0][name]) for name, weight in before.items()), "existing weights must stay intact"
    assert_equal(world)
    monkeypatch.undo()
    assert trained(world, 2)


def test_a_delta_for_another_base_is_rejected(world: World) -> None:
    world.member("a")
    assert not trained(world, 0)
    engine = world.engines["a"]
    engine._mirror.held = (world.fence, 77)  # as after an applied delta whose acknowledgement was lost
    step_of_trained(world, 1)
    assert world.train(1).attempts == 2
    assert_equal(world)
    assert trained(world, 2)


def test_a_sender_that_fails_mid_delta_sends_all_weights(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.member("a")
    assert not trained(world, 0)
    transport = type(world.sender._transport)  # type: ignore[attr-defined]

    def breaking(self: transports.Transport, delta: EncodedDelta, deadline: Deadline) -> None:
        raise RuntimeError("the network is gone")

    monkeypatch.setattr(transport, "send_delta", breaking)
    step_of_trained(world, 1)
    assert world.train(1).attempts == 2
    assert_equal(world)
    monkeypatch.undo()
    assert trained(world, 2)


def test_a_member_without_a_mirror_rejects_deltas(world: World) -> None:
    """A restarted process has another name; a member that lost its copy rejects the delta and gets all weights."""
    world.member("a")
    assert not trained(world, 0)
    world.engines["a"]._mirror.forget()
    step_of_trained(world, 1)
    assert world.train(1).attempts == 2
    assert_equal(world)


def test_auto_tries_both_encodings(tmp_path: Path, server: RedisServer) -> None:
    with open_world(tmp_path, server, "sync.encoding=auto", model=Tied(), bucket_bytes=BUCKET) as world:
        world.member("a")
        assert [trained(world, version) for version in range(3)] == [False, True, False]


def test_full_encoding_sends_no_heading_and_keeps_no_copy(tmp_path: Path, server: RedisServer) -> None:
    with open_world(tmp_path, server, model=Tied(), bucket_bytes=BUCKET) as world:
        world.member("a")
        for version in range(2):
            step_of_trained(world, version)
            world.train(version)
        assert_equal(world)
        assert world.sender.sent == {}
        assert world.engines["a"]._mirror.held == NOTHING
        assert world.sender._encoder is None  # type: ignore[attr-defined]


def test_auto_uses_the_faster_encoding_and_retries_the_other() -> None:
    choice = EncodingChoice("auto")
    used: list[bool] = []
    for _ in range(2 * TRY_AGAIN + 6):
        used.append(choice.delta())
        choice.took(used[-1], 1.0 if used[-1] else 10.0)
    assert used[:2] == [True, False]
    assert used.count(False) == 3
    assert used[2:].index(False) == TRY_AGAIN
    for _ in range(TRY_AGAIN + 2):
        choice.took(choice.delta(), 20.0 if choice.delta() else 10.0)
    assert not choice.delta()
    assert [EncodingChoice("full").delta(), EncodingChoice("delta").delta()] == [False, True]


def test_a_delta_that_exceeds_the_deadline_counts_as_slower() -> None:
    choice, used = EncodingChoice("auto"), list[bool]()
    for _ in range(2 * TRY_AGAIN + 6):
        used.append(choice.delta())
        if used[-1]:
            choice.too_slow()
        else:
            choice.took(False, 10.0)
    assert used[:2] == [True, False]
    assert used.count(True) == 3


def test_a_mismatched_delta_changes_nothing() -> None:
    from services.weights.collective import plan_buckets
    from services.weights.host_memory import describe

    weight = torch.randn(1000).bfloat16()
    manifest = plan_buckets([describe("w", weight)], BUCKET)
    encoder, mirror = BroadcastEncoder(manifest), WeightMirror()
    for _ in encoder.remember(iter([(manifest.buckets[0], [weight])])):
        pass
    broadcast.adopt(mirror, Heading(1, 0), manifest, [("w", weight.clone())])
    before = mirror.weights()[0][1].clone()
    weight[7] += 1
    delta = encoder.encode(iter([(manifest.buckets[0], [weight])]), 0, 1, 1)
    for heading in (
        Heading(2, 1, delta.heading.manifest_nbytes, delta.heading.data_nbytes),
        Heading(1, 2, delta.heading.manifest_nbytes, delta.heading.data_nbytes),
        Heading(1, 1, delta.heading.manifest_nbytes - 3, delta.heading.data_nbytes + 3),
    ):
        with pytest.raises(InvalidVersion):
            broadcast.apply(mirror, heading, delta.payload)
        assert torch.equal(mirror.weights()[0][1], before)
    assert torch.equal(broadcast.apply(mirror, delta.heading, delta.payload)[0][1], weight)
    for impossible in ([1, 1, -1, 5], [1, 1, 5, manifest.nbytes + 1], [1, 1, broadcast.MANIFEST_BYTES + 1, 0], [1, 1, 5, -1]):
        with pytest.raises(InvalidVersion, match="impossible"):
            Heading.decoded(torch.tensor(impossible), manifest)
    with pytest.raises(InvalidVersion, match="no heading"):
        Heading.decoded(torch.zeros(4, dtype=torch.int32), manifest)
