"""Payload shards spread over all masters of a cluster, are as safe as the index, and drop payloads without references."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from redis.crc import key_slot

from services.console.run.redis_server import RedisServer
from services.operations.inspection.ledger import assess, audit
from services.protocol import codec
from services.protocol.errors import Damaged, StoreError
from services.protocol.payloads import Payload
from services.runtime.redis_process import find_server
from services.store import Claim, Store, payloads
from services.store.connection import Connection
from services.store.payloads import SHARDS, shard_keys
from services.store.run import fullest
from services.store.snapshot_format import Snapshot
from tests.store.test_conservation import Walk
from tests.support import flow
from tests.support.flow import Team
from tests.support.harness import ticket
from tests.support.servers.redis_cluster import RedisCluster, redis_cluster

RUN = "spread"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with redis_cluster(tmp_path_factory.mktemp("cluster"), find_server(), RUN) as cluster:
        yield cluster


@asynccontextmanager
async def connected(cluster: RedisCluster, run: str = RUN, kind: str = "") -> AsyncIterator[Store]:
    store = await Store.connect(cluster.url(cluster.third), run, cluster.login(kind))
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def run_of(cluster: RedisCluster) -> AsyncIterator[Store]:
    """Yield the store of a separate run with shards; delete the run afterwards and check that no node keeps any of it."""
    async with connected(cluster, f"t-{uuid.uuid4().hex[:12]}") as store:
        await store.run.create("config", "dataset", 100, 12)
        yield store
        await store.restores.delete_run()
        assert all(keys_of(cluster, node, store.keys.name) == [] for node in cluster.nodes[:3])


def keys_of(cluster: RedisCluster, node: RedisServer, run: str, what: str = "") -> list[str]:
    """Return a node's keys of a run, of its index and shards, that contain `what`."""
    found = (key.decode() for key in cluster.call(node, "KEYS", "*"))
    return [key for key in found if key.startswith((f"grpo:{{{run}}}:{what}", f"grpo:{{{run}/")) and what in key]


async def held(store: Store) -> list[str]:
    """Return the names of the payloads in the shards; check that each shard's list matches its keys."""
    listed = []
    for shard in store.payloads.shards:
        names = [name.decode() for name in cast("list[bytes]", await shard.client.zrange(shard.keys.payloads, 0, -1))]
        assert all([await shard.client.exists(shard.keys.payload(name)) for name in names])
        listed += names
    return sorted(listed)


async def named(store: Store) -> dict[str, str]:
    """Return the payloads that the index refers to, and their places in shards."""
    prefix = store.keys.payload("")
    pattern = prefix.replace("{", "[{]").replace("}", "[}]")
    names = sorted([key.decode().removeprefix(prefix) async for key in store.client.scan_iter(f"{pattern}*", count=1000)])
    return {name: (await store.client.get(store.keys.payload(name)) or b"").decode() for name in names}  # type: ignore[union-attr]


async def lay(store: Store, claim: Claim) -> None:
    """Store a payload without its header, like a generator that dies before it submits."""
    await store.payloads.lay({claim.payload: codec.seal(flow.payload_bytes(claim))})


async def start(store: Store) -> Team:
    """Start a run as dataprep and the trainer do."""
    leader = await store.run.lead("leader-0:boot", 60.0)
    assert leader is not None
    team = Team(leader, await store.run.attach_trainer())
    await store.steps.publish(team.trainer, 0)
    return team


def test_shards_are_evenly_spread_over_the_slots() -> None:
    slots = [key_slot(keys.prefix.encode()) for keys in shard_keys(RUN)]
    share = 16384 / SHARDS
    assert [int(slot // share) for slot in slots] == list(range(SHARDS))
    assert all(abs(slot % share - share / 2) <= share / 16 for slot in slots)
    assert {key_slot(keys.payload("0-1.2").encode()) for keys in shard_keys(RUN)} == set(slots), "the prefix alone decides"


async def test_payloads_spread_over_all_masters_under_each_users_rights(cluster: RedisCluster) -> None:
    """Each service uses its own Redis user."""
    async with (
        connected(cluster, kind="dataprep") as dataprep,
        connected(cluster, kind="generator") as generator,
        connected(cluster, kind="trainer") as trainer,
        connected(cluster, kind="console") as console,
    ):
        await dataprep.run.create("config", "dataset", 100, 100)
        leader = await dataprep.run.lead("leader-0:boot", 60.0)
        assert leader is not None
        fence = await trainer.run.attach_trainer()
        await trainer.steps.publish(fence, 0)
        await dataprep.tickets.issue(leader, 0, [ticket(seq) for seq in range(60)])
        claims = await flow.claim(generator, "g", 60)
        assert all(await asyncio.gather(*(flow.submit(generator, "g", claim) for claim in claims)))
        assert await flow.settle(dataprep, Team(leader, fence)) == 60
        found = await trainer.steps.payloads([claim.payload for claim in claims])
        for claim in claims:
            assert (found[claim.payload].tokens == claim.fence % 1000).all()
        looked_at = await console.inspection.payload(claims[0].payload)
        assert looked_at is not None
        assert (looked_at.tokens == claims[0].fence % 1000).all()
        per_node = [len(keys_of(cluster, node, f"{RUN}", "payload:")) for node in cluster.nodes[:3]]
        assert min(per_node) >= 10, "of 60 payloads, plus 60 names on the node with the index"
        for claim in claims:
            assert await trainer.client.get(trainer.keys.payload(claim.payload)) == claim.payload.encode()
        assert await dataprep.payloads.sweep() == 0
        assert (await dataprep.run.memory())[0] > 0
        assert (await console.monitor.server()).persists
        await dataprep.replay.sweep_and_peek(leader, 1, 8)
        assert await dataprep.payloads.sweep() == 60
    async with connected(cluster) as admin:
        await admin.restores.delete_run()
    assert [keys_of(cluster, node, RUN) for node in cluster.nodes[:3]] == [[], [], []]


@pytest.mark.parametrize("seed", range(3))
async def test_a_random_walk_leaves_exactly_the_referenced_payloads(cluster: RedisCluster, seed: int) -> None:
    """Run the random walk of test_conservation.py; generators also die between payload and header, and sweeps happen at any time,
    some by callers that pause before they delete."""
    async with run_of(cluster) as store:
        walk, dice = Walk(store, seed), random.Random(seed)
        await walk.begin()
        late: list[list[str]] = []  # lists of payloads that a sweep has found and not yet deleted
        for i in range(200):
            await walk.step()
            if dice.random() < 0.1 and (one := walk.anybody()) and one[1].ticket is not None:
                await lay(store, one[1])
            if dice.random() < 0.1:
                late.append(await store.payloads.orphans())
            if late and dice.random() < 0.1:
                await store.payloads.discard(dice.choice(late))
            if dice.random() < 0.1:
                await store.payloads.sweep()
            if i % 25 == 0:
                assert set((await named(store)).values()) <= set(await held(store))
        await walk.wind_up()
        report = assess("walk", await store.run.audit())
        assert report.ok, report.messages
        assert report.outcomes["trained"] > 0
        for name in await named(store):  # left by rejected submissions; they expire
            assert await store.client.ttl(store.keys.payload(name)) > 0
            await store.client.delete(store.keys.payload(name))
        await store.payloads.sweep()
        assert await held(store) == []


async def test_a_payload_that_may_still_be_submitted_is_not_swept(cluster: RedisCluster) -> None:
    """A generator dies, or is just slow, between storing the payload and submitting the header."""
    async with run_of(cluster) as store:
        team = await start(store)
        await flow.issue(store, team, 2)
        slow, dead = await flow.claim(store, "g", 2, lease_s=0.0)
        await lay(store, slow)
        await lay(store, dead)
        assert await store.payloads.sweep() == 0
        assert await flow.submit(store, "g", slow)
        assert await store.payloads.sweep() == 0
        (again,) = await flow.claim(store, "h", 1, lease_s=0.0)
        assert again.ticket_id == dead.ticket_id
        assert await store.payloads.sweep() == 1, "another generator holds the ticket"
        assert not await flow.submit(store, "g", dead), "rejected; its payload is unreferenced"
        assert await flow.submit(store, "h", again)
        assert await flow.submit(store, "h", again), "a repeated call"
        await flow.settle(store, team)
        await store.payloads.sweep()
        assert await held(store) == [*(await named(store)).values()] == sorted([slow.payload, again.payload])


async def test_a_slow_sweep_spares_what_is_submitted_or_restored(
    cluster: RedisCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pauses after it sees a payload that the index lacks, and before it deletes one that the index has dropped."""
    async with run_of(cluster) as store, connected(cluster, store.keys.name) as sweeper:
        team = await start(store)
        kept = await flow.buffer(store, team, 3)
        await store.snapshots.save(team.trainer, -1, tmp_path / "s", payloads=True)
        await flow.issue(store, team, 1)
        (claim,) = await flow.claim(store, "g")
        await lay(store, claim)
        find, delete = sweeper.payloads._strays, sweeper.payloads._delete
        asleep, awake = asyncio.Event(), asyncio.Event()

        async def find_and_sleep(shard: Any) -> list[str]:
            found = await find(shard)
            if found:
                assert await flow.submit(store, "g", claim)
            return found

        monkeypatch.setattr(sweeper.payloads, "_strays", find_and_sleep)
        assert await sweeper.payloads.sweep() == 0

        async def sleep_and_delete(shard: Any, names: list[str]) -> None:
            asleep.set()
            await awake.wait()
            await delete(shard, names)

        monkeypatch.setattr(sweeper.payloads, "_strays", find)
        monkeypatch.setattr(sweeper.payloads, "_delete", sleep_and_delete)
        await flow.settle(store, team, "stale")
        await store.replay.sweep_and_peek(team.leader, 1, 8)
        assert await named(store) == {}
        sweeping = asyncio.create_task(sweeper.payloads.sweep())
        await asleep.wait()
        trainer = await store.run.attach_trainer()
        await store.restores.restore(trainer, Snapshot(tmp_path / "s"), True, lambda: None)
        before = await named(store)
        assert [name.rpartition(".")[0] for name in before] == sorted(kept)
        assert await held(store) == sorted(before.values()), "the others were deleted"
        awake.set()
        await sweeping
        assert await held(store) == sorted(before.values())
        assert len(await store.steps.payloads(list(before))) == 3


async def test_a_restore_of_shards_survives_an_interrupted_attempt(
    cluster: RedisCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards, groups, prepared steps and the trainer's rows refer to existing payloads with the original tokens."""
    async with run_of(cluster) as store:
        team = await start(store)
        groups = await flow.buffer(store, team, 4)
        records = await store.inspection.group_records(groups)
        plan = flow.plan(0, groups[:2], [records[name].payload for name in groups[:2]])
        await store.steps.prepare(team.leader, *plan, 0, [1.0, 1.0])
        tokens = {name: await tokens_of(store, records[name].payload) for name in groups}
        await store.snapshots.save(team.trainer, -1, tmp_path / "s", payloads=True)
        await store.steps.commit(team.trainer, 0)
        await flow.issue(store, team, 2)

        lay_all = store.payloads.lay

        async def lay_and_die(payloads: dict[str, bytes]) -> None:
            await lay_all(payloads)
            raise StoreError("killed")

        monkeypatch.setattr(store.payloads, "lay", lay_and_die)
        first = await store.run.attach_trainer()
        with pytest.raises(StoreError, match="killed"):
            await store.restores.restore(first, Snapshot(tmp_path / "s"), True, lambda: None)
        monkeypatch.undo()
        second = await store.run.attach_trainer()
        await store.restores.restore(second, Snapshot(tmp_path / "s"), True, lambda: None)
        records = await store.inspection.group_records(groups)
        assert {name: await tokens_of(store, record.payload) for name, record in records.items()} == tokens
        assert {record.header.payload for record in records.values() if record.header} == set(await named(store))
        rows = (await store.steps.rank_plan(0, 0)).rows
        assert [sample.payload for row in rows for sample in row] == [records[name].payload for name in groups[:2]]
        await store.payloads.sweep()
        assert await held(store) == sorted((await named(store)).values())
        assert (await audit(store)).ok


def owner_of(ranges: list[list[Any]], shard: Connection) -> int:
    """Return the port of the master that owns a shard."""
    slot = key_slot(shard.keys.prefix.encode())
    return next(master[1] for first, last, master, *_ in ranges if first <= slot <= last)


def offset_of(cluster: RedisCluster, node: RedisServer) -> int:
    """Return the replication offset of a node."""
    lines = cluster.call(node, "INFO", "replication").decode().splitlines()
    return int(next(line.partition(":")[2] for line in lines if line.startswith(("slave_repl_offset", "master_repl_offset"))))


async def tokens_of(store: Store, payload: str) -> list[int]:
    return (await store.steps.payloads([payload]))[payload].tokens.tolist()


async def test_a_payload_lost_by_its_shard_is_reported_as_damaged(cluster: RedisCluster) -> None:
    async with run_of(cluster) as store:
        team = await start(store)
        groups = await flow.buffer(store, team, 3)
        names = [record.payload for record in (await store.inspection.group_records(groups)).values()]
        for shard in store.payloads.shards:
            await shard.client.delete(shard.keys.payload(names[1]))
            await shard.client.zrem(shard.keys.payloads, names[1])
        with pytest.raises(Damaged) as caught:
            await store.steps.payloads(names)
        assert list(caught.value.reasons) == [names[1]]
        assert "or a server that lost its last writes" in caught.value.reasons[names[1]]
        await store.replay.sweep_and_peek(team.leader, 1, 8)
        assert await store.payloads.sweep() == 2


async def test_calls_without_payloads_work_while_a_shard_is_down(cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_of(cluster) as store:

        async def silent(*_: str) -> dict[str, str]:
            await asyncio.sleep(3600)
            return {}

        async def away(*_: str) -> dict[str, str]:
            raise StoreError("nobody there")

        monkeypatch.setattr(payloads, "ANSWER_S", 0.05)
        monkeypatch.setattr(store.payloads.shards[0], "info", silent)
        monkeypatch.setattr(store.payloads.shards[1], "info", away)
        assert (await store.run.memory())[0] > 0
        assert (await store.monitor.server()).clients > 0

        async def refuse() -> None:
            raise StoreError("a shard is away")

        monkeypatch.setattr(store.payloads, "check", refuse)
        assert not await store.run.create("config", "dataset", 100, 12), "attaching contacts no shard"


def test_the_fullest_server_is_chosen_by_share_or_by_bytes() -> None:
    memory = [{"used_memory": "50", "maxmemory": "100"}, {"used_memory": "60", "maxmemory": "600"}]
    assert fullest(memory) == (50, 100)
    assert fullest([{"used_memory": "50"}, {"used_memory": "60"}]) == (60, 0)


async def test_every_master_must_meet_the_requirements(cluster: RedisCluster) -> None:
    async with connected(cluster, "unfit") as store:
        cluster.call(cluster.other, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        try:
            with pytest.raises(StoreError, match="has maxmemory-policy allkeys-lru"):
                await store.run.create("config", "dataset", 1, 1)
        finally:
            cluster.call(cluster.other, "CONFIG", "SET", "maxmemory-policy", "noeviction")
        assert await store.run.state() is None


async def test_without_shards_the_commands_are_unchanged(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the commands that carry a group's payload or header with the expected ones, byte for byte."""
    sent: list[tuple[Any, ...]] = []
    exchange = store.connection._exchange

    async def note(commands: Any) -> list[Any]:
        sent.extend(commands)
        return await exchange(commands)

    team = await flow.start(store)
    await flow.issue(store, team, 1)
    (claim,) = await flow.claim(store, "g")
    monkeypatch.setattr(store.connection, "_exchange", note)
    assert await flow.submit(store, "g", claim)
    sealed, function = codec.seal(flow.payload_bytes(claim)), f"{store.connection._library}_submit"
    body = codec.encode(flow.header(claim))
    assert sent == [
        ("SET", store.keys.payload(claim.payload), sealed, "EX", flow.TTL_S, "NX"),
        ("FCALL", function, 1, store.keys.prefix, b"g", claim.entry.encode(), claim.fence, claim.ticket_id.encode(), body),
    ]
    sent.clear()
    payload: Payload = (await store.steps.payloads([claim.payload]))[claim.payload]
    assert sent == [("MGET", store.keys.payload(claim.payload))]
    assert np.array_equal(payload.tokens, codec.decode(flow.payload_bytes(claim), Payload).tokens)
    sent.clear()
    assert await store.payloads.sweep() == 0
    assert sent == []


async def test_a_shard_follows_its_slot(tmp_path: Path) -> None:
    """Under load, the master of some shards dies and its replica takes over, then a shard's slot moves to another master.
    Everything acknowledged before survives."""
    with redis_cluster(tmp_path, find_server(), RUN, replicated=1) as cluster:
        async with connected(cluster) as store:
            await store.run.create("config", "dataset", 100, 10_000)
            team = await start(store)
            done: list[str] = []
            busy = True

            async def work() -> None:
                while busy:
                    done.extend(await flow.buffer(store, team, 8))
                    await store.payloads.sweep()

            async def more() -> None:
                wanted = len(done) + 96
                while len(done) < wanted:
                    assert not working.done(), working.exception()
                    await asyncio.sleep(0.01)

            working = asyncio.create_task(work())
            await more()
            before = list(done)
            there = cluster.slots(cluster.replica)
            lost, *_ = [shard for shard in store.payloads.shards if owner_of(there, shard) == cluster.other.port]

            def kill() -> None:
                offset = offset_of(cluster, cluster.other)  # covers everything acknowledged so far
                cluster.wait(lambda: offset_of(cluster, cluster.replica) >= offset)
                cluster.other.kill()
                cluster.take_over(cluster.replica)

            await asyncio.to_thread(kill)
            await more()
            slot = key_slot(lost.keys.prefix.encode())
            moved = await asyncio.to_thread(cluster.move_slot, cluster.replica, cluster.third, lambda: time.sleep(0.2), slot)
            assert moved > 3
            await more()
            busy = False
            await working
            records = await store.inspection.group_records(before)
            assert len(await store.steps.payloads([record.payload for record in records.values()])) == len(before)
            assert (await audit(store)).messages == ()
            await store.payloads.sweep()
            assert await held(store) == sorted((await named(store)).values())
            await store.restores.delete_run()


async def test_the_sample_log_knows_the_size_of_payloads_in_shards(cluster: RedisCluster) -> None:
    async with run_of(cluster) as store:
        team = await flow.start(store)
        state = await store.run.state()
        assert state is not None
        await store.samples.log(state.incarnation, -1, 1.0, 60.0)
        await flow.issue(store, team, 1)
        [one] = await flow.claim(store, "g")
        assert await flow.submit(store, "g", one)
        await flow.settle(store, team, "filtered:zero")
        [waiting] = await store.samples.waiting(10)
        assert waiting.size == len(waiting.outcome) + len(waiting.header) + flow.header(one).payload_bytes
