"""Rounds with a version store: followers get deltas, and latecomers get anchors and deltas without the trainer."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from structlog.testing import capture_logs

from services.console.run.redis_server import RedisServer
from services.protocol.errors import StoreError
from services.protocol.messages import PodStatus, Round
from services.weights.checksums import WeightChanged
from services.weights.receiver import TransferFailed
from services.weights.rounds import catch_up, member
from services.weights.transport import SendFailed
from services.weights.versions import catalogue
from services.weights.versions.catalogue import CATALOGUE, Catalogue
from services.weights.versions.mirror import Delta, WeightMirror
from services.weights.versions.objects import FolderObjects
from tests.support.harness import wait_until
from tests.support.rounds_world import World, open_world
from tests.support.scripted import ScriptedEngine

SIZE = 128


@pytest.fixture
def world(tmp_path: Path, server: RedisServer) -> Iterator[World]:
    model = torch.nn.Linear(SIZE, SIZE, dtype=torch.bfloat16)
    with open_world(tmp_path, server, "sync.backend=store", f"sync.folder={tmp_path}/volume", model=model) as world:
        yield world


@pytest.fixture
def announced(world: World, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what another reader announces: everything, until it is cleared. Anchors are frequent."""
    found, sweep = [f"{world.fence}/0"], world.sender.sweep
    monkeypatch.setattr(catalogue, "ANCHOR_EVERY", 2)
    monkeypatch.setattr(world.sender, "sweep", lambda readers: sweep(lambda: [*readers(), *found]))
    return found


def step(world: World, seed: int) -> None:
    """Change about a fiftieth of the weights."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in world.model.parameters():
            weight += torch.where(torch.rand_like(weight) < 0.02, torch.randn_like(weight), 0.0)


def known(world: World, tmp_path: Path) -> Catalogue:
    return catalogue.decode((tmp_path / "volume" / str(world.fence) / CATALOGUE).read_bytes(), world.fence)


def count(metric: Any) -> float:
    """Return the value of a counter."""
    return metric.collect()[0].samples[0].value


def assert_equal(world: World, *names: str) -> None:
    for name in names or world.engines:
        held = world.engines[name].weights
        for weight, tensor in world.model.named_parameters():
            assert torch.equal(held[weight].view(torch.int16), tensor.detach().view(torch.int16)), (
                f"{name} holds another {weight}"
            )


def test_members_follow_by_deltas(world: World, tmp_path: Path) -> None:
    members = {world.member("a"), world.member("b")}
    for version in range(5):
        step(world, version)
        report = world.train(version)
        assert (set(report.members), report.attempts, report.epoch) == (members, 1, 1)
        assert_equal(world)
    held = known(world, tmp_path)
    assert [entry.base for entry in held.entries] == [None, 0, 1, 2, 3]
    anchor, *deltas = held.entries
    assert anchor.nbytes == anchor.full_nbytes
    assert all(entry.nbytes < 0.1 * entry.full_nbytes for entry in deltas)


def test_a_latecomer_fetches_the_weights_without_the_trainer(world: World) -> None:
    world.member("a")
    for version in range(3):
        step(world, version)
        world.train(version)
    world.member("late")  # no round is opened from here on

    world.portal.call(wait_until(lambda: world.engines["late"].version == 2))
    assert_equal(world, "late")
    assert world.rounds.catch_up(2) is None
    registry = world.metrics["late"]
    assert count(registry.catch_ups) == 1
    assert count(registry.fetched_bytes) > SIZE * SIZE * 2, "an anchor and two deltas"
    status = world.portal.call(world.store.fleet.members(60))
    step(world, 3)
    assert len(world.train(3).members) == len(status) == 2, "it takes part in the next round"
    assert_equal(world)


def test_a_member_that_missed_rounds_fetches_the_missing_deltas(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.member("a")
    world.member("b")
    world.train(0)
    world.hold("b", 0)  # it is evaluating, and declines
    for version in (1, 2, 3):
        step(world, version)
        world.train(version)
    assert world.versions() == {"a": 3, "b": 0}
    applied: list[int | None] = []
    apply = WeightMirror.apply

    def noted(mirror: WeightMirror, delta: Delta, last: bool) -> None:
        applied.append(delta.manifest.base)
        apply(mirror, delta, last)

    monkeypatch.setattr(WeightMirror, "apply", noted)
    world.release("b")

    world.portal.call(wait_until(lambda: world.versions()["b"] == 3))
    assert applied == [0, 1, 2], "deltas instead of an anchor"
    assert_equal(world)


@pytest.mark.parametrize("lost", ["beat", "round_of"])
def test_a_fetch_outlasts_an_outage_of_redis(world: World, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis fails before the fetch reads anything (`beat`), or while the follower of rounds fetches (`round_of`)."""
    fetching, failures = threading.Event(), list[str]()

    class Slow(ScriptedEngine):
        async def join(self, round: Round, first_rank: int) -> None:
            fetching.set()
            while not failures:
                await asyncio.sleep(0.01)
            await super().join(round, first_rank)

    world.member("a")
    world.train(0)
    call = getattr(world.store.fleet, lost)

    async def flaky(of: Any, *given: Any) -> Any:
        due = of.fetching if lost == "beat" else fetching.is_set() and "late" in of
        if due and not failures:
            failures.append(lost)
            raise StoreError("Redis is restarting")
        return await call(of, *given)

    monkeypatch.setattr(world.store.fleet, lost, flaky)
    world.member("late", Slow())
    world.portal.call(wait_until(lambda: world.engines["late"].version == 0))
    assert failures == [lost]
    step(world, 1)
    assert len(world.train(1).members) == 2, "it takes part in the next round"
    assert_equal(world)


def test_weights_that_cannot_be_applied_are_fetched_ever_more_seldom(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, fails = list[float](), threading.Event()
    fails.set()

    class Full(ScriptedEngine):
        async def receive(self, version: int) -> None:
            tried.append(time.monotonic())
            if fails.is_set():
                raise TransferFailed("no memory")
            await super().receive(version)

    monkeypatch.setattr(member, "POLL_S", 0.01)
    monkeypatch.setattr(catch_up, "AGAIN_S", (0.1, 0.4))
    world.member("a")
    world.train(0)
    with capture_logs() as logs:
        world.member("late", Full())
        world.portal.call(wait_until(lambda: len(tried) == 5))
        fails.clear()
        world.portal.call(wait_until(lambda: world.versions()["late"] == 0))
    for (before, after), pause_s in zip(pairwise(tried), (0.1, 0.2, 0.4, 0.4, 0.4), strict=True):
        assert after - before >= pause_s
    assert [log["error"] for log in logs if log["log_level"] == "warning"] == ["no memory"]
    assert count(world.metrics["late"].sync_failures) == 5
    assert_equal(world)


def test_a_fetching_member_declines_rounds(world: World) -> None:
    class Slow(ScriptedEngine):
        async def stage(self, version: int, limit_s: float | None = None) -> None:
            await released.wait()
            await super().stage(version, limit_s)

    alive = world.member("a")
    world.train(0)
    released = asyncio.Event()
    late = world.member("late", Slow())

    async def fetching() -> bool:
        return any(pod.fetching for pod in await world.store.fleet.members(60) if pod.member == late)

    world.portal.call(wait_until(fetching))
    for version in (1, 2):
        step(world, version)
        report = world.train(version)
        assert report.members == (alive,)
        assert report.total_s < world.config.sync.answer_s
    world.portal.loop.call_soon_threadsafe(released.set)

    world.portal.call(wait_until(lambda: world.versions()["late"] == 2))
    assert_equal(world)


@pytest.mark.parametrize("closes", [True, False])
def test_a_lone_member_that_declined_applies_what_it_fetched(closes: bool, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer read the fleet just before the member said that it fetches. It may have died before it closed the round."""

    class Slow(ScriptedEngine):
        async def stage(self, version: int, limit_s: float | None = None) -> None:
            await released.wait()
            await super().stage(version, limit_s)

    world.member("a")
    world.train(0)
    world.kill("a")
    released, read, attempted = asyncio.Event(), world.store.fleet.members, world.store.fleet.set_round
    late = world.member("late", Slow())

    async def fetching() -> bool:
        return any(pod.fetching for pod in await read(60) if pod.member == late)

    async def early(ttl_s: float) -> list[PodStatus]:
        """Return the lone member, until it has declined without what it says of fetching."""
        pods = [pod for pod in await read(ttl_s) if pod.member == late]
        return pods if released.is_set() else [msgspec.structs.replace(pod, fetching="") for pod in pods]

    async def opens(fence: int, current: Round) -> None:
        if current.phase != "failed" or closes:
            await attempted(fence, current)

    async def declined() -> None:
        async def has() -> bool:
            return late in (acks := (await world.store.fleet.round())[1]) and acks[late][0] == "declined"

        await wait_until(has)
        released.set()

    world.portal.call(wait_until(fetching))
    monkeypatch.setattr(world.store.fleet, "members", early)
    monkeypatch.setattr(world.store.fleet, "set_round", opens)
    release = asyncio.run_coroutine_threadsafe(declined(), world.portal.loop)
    step(world, 1)
    deadline = time.monotonic() + 20
    assert world.train(1, lambda: time.monotonic() > deadline).members == (late,)
    release.result(5)
    assert world.versions()["late"] == 1
    assert count(world.metrics["late"].catch_ups) == 1
    assert_equal(world, "late")


def test_announced_versions_are_kept_until_released(world: World, announced: list[str], tmp_path: Path) -> None:
    world.member("a")
    for version in range(8):
        step(world, version)
        world.train(version)
    folder = tmp_path / "volume" / str(world.fence)
    assert (folder / "0.anchor").exists()
    assert (folder / "1.delta").exists()
    assert known(world, tmp_path).entries[0].version >= 3, "the catalogue states where others start"
    announced.clear()
    for version in range(8, 12):
        step(world, version)
        world.train(version)
    assert not (folder / "0.anchor").exists()
    assert {path.name for path in folder.iterdir()} - {CATALOGUE} <= {
        entry.folder for entry in known(world, tmp_path).entries
    } | {"11.anchor"}
    late = world.member("late")
    world.portal.call(wait_until(lambda: world.versions()["late"] == 11))
    assert late
    assert_equal(world)


def test_what_a_reader_kept_is_deleted_once_it_is_done(
    world: World, announced: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.member("a")
    for version in range(6):
        step(world, version)
        world.train(version)
    folder = tmp_path / "volume" / str(world.fence)
    assert (folder / "0.anchor").exists()
    announced.clear()
    monkeypatch.setattr(catalogue, "ANCHOR_EVERY", 100)  # nothing else calls for a sweep
    step(world, 6)
    world.train(6)
    assert not (folder / "0.anchor").exists()
    world.sender.sweep(lambda: pytest.fail("there is nothing to sweep"))


def test_versions_that_are_all_written_whole_are_swept(world: World, tmp_path: Path) -> None:
    """A delta of weights that changed everywhere would be as large as the weights."""
    world.member("a")
    for version in range(6):
        torch.manual_seed(version)
        with torch.no_grad():
            for weight in world.model.parameters():
                weight.view(torch.int16).random_(-(2**15), 2**15)
        world.train(version)
    folder = tmp_path / "volume" / str(world.fence)
    assert {path.name for path in folder.iterdir()} == {CATALOGUE, "4.anchor", "5.anchor"}
    assert_equal(world)


def test_a_store_that_lost_its_objects_gets_an_anchor(world: World, tmp_path: Path) -> None:
    world.member("a")
    for version in range(2):
        step(world, version)
        world.train(version)
    shutil.rmtree(tmp_path / "volume")
    step(world, 2)
    world.train(2)
    assert [entry.folder for entry in known(world, tmp_path).entries] == ["2.anchor"]
    world.member("late")
    world.portal.call(wait_until(lambda: world.versions()["late"] == 2))
    assert_equal(world)


def test_a_failed_write_costs_an_attempt_but_no_anchor(world: World, tmp_path: Path) -> None:
    world.member("a")
    world.train(0)
    step(world, 1)
    (tmp_path / "volume" / str(world.fence) / "1.delta" / "0.0").mkdir(parents=True)  # where its data is to be written
    begun = tmp_path / "volume" / str(world.fence) / "1.delta"

    def send(version: int, fence: int, damaged: bool) -> None:
        try:
            world.sender.send(version, fence, damaged)
        except SendFailed:
            shutil.rmtree(begun)
            raise

    world.send = send
    report = world.train(1)
    assert report.attempts == 2
    assert [entry.base for entry in known(world, tmp_path).entries] == [None, 0]
    assert_equal(world)


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


@pytest.mark.parametrize(
    ("file", "damage"),
    [("0.0", flip), ("0.0", lambda data: data[:-3]), ("0.0", lambda _: b""), ("manifest", flip), ("manifest", lambda _: b"{}")],
)
def test_a_version_that_is_damaged_in_the_store_is_replaced_by_an_anchor(
    file: str, damage: Callable[[bytes], bytes], world: World, tmp_path: Path
) -> None:
    world.member("a")
    world.train(0)
    step(world, 1)
    spoiled = list[Path]()

    def send(version: int, fence: int, damaged: bool) -> None:
        world.sender.send(version, fence, damaged)
        if not spoiled:
            spoiled.append(tmp_path / "volume" / str(world.fence) / "1.delta" / file)
            spoiled[0].write_bytes(damage(spoiled[0].read_bytes()))

    world.send = send
    assert world.train(1).attempts == 2
    assert_equal(world)
    assert [entry.folder for entry in known(world, tmp_path).entries] == ["1.anchor"], "nothing is built on what was damaged"
    step(world, 2)
    assert world.train(2).attempts == 1
    assert_equal(world)
    world.member("late")
    world.portal.call(wait_until(lambda: world.versions()["late"] == 2))


def test_damage_that_one_member_found_is_followed_by_an_anchor(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.member("a")
    world.member("b")
    world.train(0)

    apply, damaged_ones = WeightMirror.apply, list[WeightMirror]()

    def differs(mirror: WeightMirror, delta: Delta, last: bool) -> None:
        damaged_ones.append(mirror)
        if damaged_ones[0] is mirror:
            raise WeightChanged("weight")
        apply(mirror, delta, last)

    step(world, 1)
    with monkeypatch.context() as damaged:
        damaged.setattr(WeightMirror, "apply", differs)
        assert len(world.train(1).members) == 1
    step(world, 2)
    assert len(world.train(2).members) == 2
    assert [entry.folder for entry in known(world, tmp_path).entries] == ["2.anchor"]
    assert_equal(world)


def test_what_is_left_of_an_anchor_that_could_not_be_written_is_deleted(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "ANCHOR_EVERY", 2)
    world.member("a")
    world.train(0)
    put = FolderObjects.put

    def full(objects: FolderObjects, name: str, data: Any) -> None:
        put(objects, name, data)
        if "/2.anchor/" in name:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FolderObjects, "put", full)
    for version in (1, 2, 3):
        step(world, version)
        assert world.train(version).attempts == 1
    assert [entry.folder for entry in known(world, tmp_path).entries] == ["0.anchor", "1.delta", "2.delta", "3.delta"]
    assert not (tmp_path / "volume" / str(world.fence) / "2.anchor").exists()


def test_a_trainer_makes_room_in_a_store_that_its_predecessor_filled(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.member("a")
    world.train(0)
    before = tmp_path / "volume" / str(world.fence)
    world.fence = world.portal.call(world.store.run.attach_trainer())
    world.rounds.fence = world.fence
    world.rounds.membership.breaks()  # as its process knows of no group
    put = FolderObjects.put

    def full(objects: FolderObjects, name: str, data: Any) -> None:
        if before.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        put(objects, name, data)

    monkeypatch.setattr(FolderObjects, "put", full)
    step(world, 1)
    world.train(1)
    assert_equal(world)


def test_a_new_trainer_starts_with_an_anchor_and_cleans_up(world: World, tmp_path: Path) -> None:
    world.member("a")
    world.train(0)
    old, world.fence = world.fence, world.portal.call(world.store.run.attach_trainer())
    world.rounds.fence = world.fence
    world.rounds.membership.breaks()  # as its process knows of no group
    step(world, 1)
    assert world.train(1).attempts == 1
    assert_equal(world)
    assert [entry.base for entry in known(world, tmp_path).entries] == [None]
    assert not (tmp_path / "volume" / str(old)).exists()


DYING_WRITER = """
import os, signal, sys
import torch
from services.weights.versions import objects
from pathlib import Path
store, rename = objects.FolderObjects(Path(sys.argv[1])), Path.rename
store.put("1/0.anchor/0.0", [b"old"])
def dying(self, target):
    os.kill(os.getpid(), signal.SIGKILL)
Path.rename = dying
store.put("1/0.anchor/0.0", [b"new" * 1000])
"""


def test_a_killed_writer_leaves_objects_intact(tmp_path: Path) -> None:
    from services.weights.versions.catalogue import garbage

    done = subprocess.run([sys.executable, "-c", DYING_WRITER, str(tmp_path)], env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    store = FolderObjects(tmp_path)
    assert bytes(store.get("1/0.anchor/0.0")) == b"old"
    leftover = [name for name in store.names() if name.endswith(".partial")]
    assert len(leftover) == 1
    assert set(leftover) <= set(garbage(store.names(), Catalogue(2), [], [])), "the next trainer sweeps it"
