"""A run on a Redis Cluster can be reached through any node, and follows its slot between masters."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
import redis

from services.console.run.redis_server import RedisServer
from services.operations.inspection.ledger import audit
from services.protocol.errors import StoreError
from services.protocol.keys import TOPICS
from services.runtime.loops import end_tasks
from services.runtime.process_tools import free_port
from services.runtime.redis_process import find_server
from services.store import Store, client
from services.store.cluster import SlotOwner
from tests.support import flow
from tests.support.harness import ticket, wait_until
from tests.support.servers.certificates import make_certificates
from tests.support.servers.redis_cluster import RedisCluster, redis_cluster

RUN = "clustered"
Changed = TypeVar("Changed")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    with redis_cluster(tmp_path, find_server(), RUN) as cluster:
        yield cluster


@asynccontextmanager
async def store_at(cluster: RedisCluster, node: RedisServer, kind: str = "") -> AsyncIterator[Store]:
    """Yield a store that is connected through this node with the rights of a kind of service."""
    store = await Store.connect(cluster.url(node), RUN, cluster.login(kind))
    try:
        yield store
    finally:
        await store.close()


class Work:
    """Load until `stop`: dataprep issues tickets and generators submit them, each as its own Redis user."""

    def __init__(self, leader: Store, generators: list[Store], team: flow.Team) -> None:
        self.submitted: list[str] = []
        self.heard = 0
        self._leader, self._generators, self._team = leader, generators, team
        self._busy = True
        self._done = asyncio.create_task(self._work())
        self._listening = asyncio.create_task(self._listen())

    async def during(self, change: Callable[[], Changed]) -> Changed:
        """Make a change under load; check that work continues afterwards and that listeners are still notified."""
        await self._makes_progress()
        changed = await asyncio.to_thread(change)
        await self._makes_progress()
        return changed

    async def stop(self) -> None:
        self._busy = False
        await self._done
        await end_tasks([self._listening])

    async def _makes_progress(self) -> None:
        for _ in range(2):  # after two rounds, everything that was in flight has finished
            done, heard = len(self.submitted) + 5, self.heard + 5
            await wait_until(lambda done=done, heard=heard: len(self.submitted) >= done and self.heard >= heard)

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._issue())
            for number, store in enumerate(self._generators):
                tasks.create_task(self._generate(store, f"g{number}"))

    async def _listen(self) -> None:
        async with self._leader.monitor.listening() as notifications:
            notifications.add(*TOPICS)
            async for _ in notifications:
                self.heard += 1

    async def _issue(self) -> None:
        while self._busy:
            state = await self._leader.run.state()
            assert state is not None
            await self._leader.tickets.issue(self._team.leader, state.cursor, [ticket(state.cursor + i) for i in range(4)])
            await asyncio.sleep(0.01)

    async def _generate(self, store: Store, name: str) -> None:
        while self._busy:
            try:
                for one in await flow.claim(store, name, 2, lease_s=0.5):
                    if await flow.submit(store, name, one):
                        self.submitted.append(one.ticket_id)
            except StoreError as error:  # a generator may not load the functions; dataprep is about to
                if "does not have the functions of this version yet" not in str(error):
                    raise
            await asyncio.sleep(0.005)


async def test_a_run_follows_its_slot(cluster: RedisCluster) -> None:
    """Under load, the master fails over to a replica, the slot moves to another master and back, and the master dies.

    Everything acknowledged before the kill survives, except for the last moments, because replication is asynchronous.
    """
    await check_that_the_owner_is_verified(cluster)
    async with AsyncExitStack() as stack:
        leader, trainer, one, two = [
            await stack.enter_async_context(store_at(cluster, cluster.third, kind))
            for kind in ("dataprep", "trainer", "generator", "generator")
        ]
        await leader.run.create("config", "dataset", 100, 100_000)
        fence = await leader.run.lead("leader", 600)
        assert fence is not None
        team = flow.Team(fence, await trainer.run.attach_trainer())
        await trainer.steps.publish(team.trainer, 0)
        work = Work(leader, [one, two], team)

        await work.during(lambda: cluster.fail_over(cluster.replica))
        moved = await work.during(lambda: cluster.move_slot(cluster.replica, cluster.other, lambda: time.sleep(0.2)))
        assert moved > 20
        acknowledged = list(work.submitted)
        await work.during(lambda: cluster.move_slot(cluster.other, cluster.replica, lambda: None))
        assert set(acknowledged) <= {item.ticket for item in await leader.replay.read_headers(team.leader, 100_000)}

        def kill() -> None:
            cluster.replica.kill()
            cluster.take_over(cluster.owner)

        await work.during(kill)
        await work.stop()
        assert (await audit(leader)).messages == ()
        items = await leader.replay.read_headers(team.leader, 100_000)
        names = [item.ticket for item in items]
        assert len(names) == len(set(names)), "no group was stored twice"
        assert set(acknowledged) <= set(names) <= set(work.submitted)
        for item in items:
            assert (await leader.steps.payloads([item.payload]))[item.payload].tokens.size > 0

    async with store_at(cluster, cluster.third) as admin:
        await admin.restores.delete_run()
        assert cluster.call(cluster.owner, "CLUSTER", "COUNTKEYSINSLOT", cluster.slot) == 0


async def check_that_the_owner_is_verified(cluster: RedisCluster) -> None:
    """Check that a connection through any node verifies the settings of the slot's owner."""
    cluster.call(cluster.owner, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(StoreError, match="has maxmemory-policy allkeys-lru"):
        await Store.connect(cluster.third.url, RUN, cluster.password)
    cluster.call(cluster.owner, "CONFIG", "SET", "maxmemory-policy", "noeviction")


async def test_a_run_works_on_a_cluster_over_tls(tmp_path: Path) -> None:
    """The client handles pipelines, transactions, functions and payload shards."""
    if shutil.which("redis-server") is None or shutil.which("openssl") is None:
        pytest.skip("needs redis-server with TLS, and openssl to make certificates")
    certificates = make_certificates(tmp_path)
    with redis_cluster(tmp_path, "redis-server", RUN, certificates) as cluster:
        async with store_at(cluster, cluster.third) as store:
            await store.run.create("config", "dataset", 100, 8)
            team = await flow.start(store)
            first, *others = await flow.buffer(store, team, 3)
            await asyncio.to_thread(cluster.fail_over, cluster.replica)
            assert await flow.buffer(store, team, 2)
            await asyncio.to_thread(cluster.move_slot, cluster.replica, cluster.other, lambda: None)
            assert (await store.inspection.whereabouts(first)).ticket == first
            records = await store.inspection.group_records([first, *others])
            assert len(await store.steps.payloads([record.payload for record in records.values()])) == 3
            assert await flow.issue(store, team, 1) == 1
            assert await store.inspection.issued_ticket("0-5") is not None
            assert (await audit(store)).messages == ()
            await store.restores.delete_run()
            assert await store.run.state() is None


async def test_an_unusable_cluster_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each missing requirement is a one-line error."""
    node = RedisServer(tmp_path)
    node._options |= {"cluster-enabled": "yes", "cluster-port": str(free_port()), "unixsocket": str(tmp_path / "socket")}
    node.start()
    try:
        with pytest.raises(StoreError, match=r"is not serving the run yet .* knows no master of slot \d+.*redis-cli --cluster"):
            await Store.connect(node.url, RUN, node.password)
        with redis.Redis(port=node.port, password=node.password) as admin:
            admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            admin.execute_command("ACL", "SETUSER", "blind", "on", ">secret", "~*", "&*", "+@all", "-cluster")
        with pytest.raises(StoreError, match=r"no such database .*: end redis.url in /0, the only one of a Redis Cluster"):
            await Store.connect(node.url.replace("/0", "/3"), RUN, node.password)
        with pytest.raises(
            StoreError, match=r"other nodes cannot be reached through a socket file: set redis.url to redis://host:port/0"
        ):
            await Store.connect(f"unix://{tmp_path / 'socket'}", RUN, node.password)
        with pytest.raises(StoreError, match=r"denies this user permission .*: give it the rights that `grpo acl` prints"):
            await Store.connect(node.url.replace("//", "//blind:secret@"), RUN)
        with redis.Redis(port=node.port, password=node.password) as admin:
            admin.config_set("min-replicas-to-write", 1)
        monkeypatch.setattr(client, "RETRIES", 2)  # the client retries because a replica may still appear
        with pytest.raises(StoreError, match=r"is not serving the run yet \(NOREPLICAS"):
            await Store.connect(node.url, RUN, node.password)
    finally:
        node.kill()


class FakeConnection:
    """A fake connection whose node replies to CLUSTER SLOTS with its entry in `known`."""

    known: ClassVar[dict[str, Any]] = {}

    def __init__(self, host: str, **_: Any) -> None:
        self.host = host

    async def connect(self) -> None: ...

    async def send_command(self, *words: str) -> None: ...

    async def read_response(self) -> Any:
        return self.known[self.host]

    async def disconnect(self, nowait: bool) -> None: ...


async def test_nodes_without_a_hostname_or_slots_are_handled() -> None:
    owner = SlotOwner(FakeConnection, {"host": "given", "port": 1}, "run")  # type: ignore[arg-type]
    FakeConnection.known = {"given": [[0, 16383, [b"first", 2, b"id"], [b"?", 3, b"id"]]]}
    assert await owner.find() == ("first", 2)
    FakeConnection.known = {"given": [], "first": [[0, 16383, [b"", 4, b"id"]]]}
    assert {await owner.find() for _ in range(8)} == {("first", 4)}
    assert await owner.of("a shard").find() == ("first", 4), "although the given node no longer knows the cluster"
    FakeConnection.known = {"given": [[0, 16383, [b"?", 3, b"id"]]], "first": []}
    with pytest.raises(redis.ConnectionError, match=r"set cluster-announce-hostname|knows no master"):
        await owner.find()
