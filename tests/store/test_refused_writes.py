"""A server that rejects writes, because it is full or cannot write to its disk, serves processes that start, too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.exceptions import OutOfMemoryError

from services.console.run.redis_server import RedisServer
from services.protocol.errors import RedisFull, StoreError
from services.store import Store
from services.store.snapshot_format import Snapshot
from tests.support import flow
from tests.support.harness import wait_until

RUN = "refused"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """Yield a server of the test's own, also reached through the file `socket`."""
    server = RedisServer(tmp_path)
    server._options |= {"unixsocket": str(tmp_path / "socket")}
    server.start()
    yield server
    server.kill()


def address(server: RedisServer, way: str) -> str:
    """Return the address of the server by TCP or by its socket file."""
    return server.url if way == "tcp" else f"unix://{server.folder / 'socket'}"


@pytest.mark.parametrize("way", ["tcp", "socket"])
async def test_a_process_that_starts_drains_a_full_server(server: RedisServer, way: str) -> None:
    """For example the trainer, which was killed when the server was full: only a checkpoint of its frees memory."""
    url = address(server, way)
    before = await Store.connect(url, RUN, server.password)
    team = await flow.start(before)
    await flow.buffer(before, team, 1)
    (group,) = await flow.oldest_groups(before, 1)
    await flow.prepare(before, team, 0, [group.group])
    await before.client.config_set("maxmemory", "1mb")
    store = await Store.connect(url, RUN, server.password)
    trainer = await store.run.attach_trainer()
    assert await store.steps.commit(trainer, 0)
    assert await store.steps.publish(trainer, 1)
    await store.steps.checkpointed(trainer, 0)
    assert await store.steps.retire() == 1
    for each in (before, store):
        await each.close()


@pytest.mark.parametrize("way", ["tcp", "socket"])
async def test_a_full_server_without_the_functions_is_reported_as_full(server: RedisServer, way: str) -> None:
    url = address(server, way)
    with redis.Redis(port=server.port, password=server.password) as admin:
        admin.config_set("maxmemory", "1mb")
    store = await Store.connect(url, RUN, server.password)
    with pytest.raises(RedisFull, match="is full: raise its maxmemory"):
        await store.run.create("config", "dataset", 1, 1)
    await store.close()


@pytest.mark.parametrize("way", ["tcp", "socket"])
async def test_a_server_that_cannot_write_to_its_disk_is_still_read(server: RedisServer, way: str) -> None:
    url = address(server, way)
    before = await Store.connect(url, RUN, server.password)
    await before.run.create("config", "dataset", 7, 1)
    await before.close()
    (server.folder / "dump.rdb").mkdir()  # the server cannot replace it with a file
    with redis.Redis(port=server.port, password=server.password, decode_responses=True) as admin:
        admin.config_set("save", "3600 1000")
        admin.bgsave()
        await wait_until(lambda: admin.info("persistence")["rdb_last_bgsave_status"] == "err")
    store = await Store.connect(url, RUN, server.password)
    state = await store.run.state()
    assert state is not None
    assert state.steps == 7
    with pytest.raises(StoreError, match="cannot be used: MISCONF"):
        await store.run.pause("trainer", "for a test")
    await store.close()


async def test_a_restore_frees_the_memory_of_what_it_replaces(server: RedisServer, tmp_path: Path) -> None:
    """The server is full of groups that came after the checkpoint."""
    store = await Store.connect(server.url, RUN, server.password)
    team = await flow.start(store)
    await flow.buffer(store, team, 2)
    await store.snapshots.save(team.trainer, -1, tmp_path / "snapshot", True)
    limit = (await store.run.memory())[0] + 2**20
    await store.client.config_set("maxmemory", limit)
    with contextlib.suppress(OutOfMemoryError):
        for number in range(1000):
            await store.client.set(store.keys.payload(f"9-{number}.1"), bytes(2**16))
    with pytest.raises(OutOfMemoryError):
        await store.client.set(store.keys.payload("9-1000.1"), bytes(2**16))
    trainer = await store.run.attach_trainer()
    await store.restores.restore(trainer, Snapshot(tmp_path / "snapshot"), True, lambda: None)
    state = await store.run.state()
    assert state is not None
    assert state.restoring == -1
    assert len(await flow.oldest_groups(store, 9)) == 2
    await store.close()
