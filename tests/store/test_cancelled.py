"""Cancelled attempts leave no connection open for the garbage collector to close at an arbitrary time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.console.run.redis_server import RedisServer
from services.store.client import Login, closed, make_client
from services.store.connection import Connection
from tests.support.harness import wait_until


async def test_a_client_is_closed_even_if_close_is_cancelled(server: RedisServer) -> None:
    client: Any = make_client(server.url, Login(server.password))
    await client.ping()
    (connection,) = client.connection_pool._available_connections
    assert connection.is_connected
    closing = asyncio.create_task(closed(client))
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await wait_until(lambda: not connection.is_connected)


async def test_a_connection_cancelled_before_it_is_returned_is_closed(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, loaded, exchange = list[Connection](), asyncio.Event(), Connection._exchange

    async def then_hangs(store: Connection, commands: Any) -> Any:
        await exchange(store, commands)
        begun.append(store)
        loaded.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Connection, "_exchange", then_hangs)
    connecting = asyncio.create_task(Connection.connect(server.url, "cancelled", server.password))
    await loaded.wait()
    (pool,) = [store.client.connection_pool for store in begun]
    (connection,) = pool._available_connections
    assert connection.is_connected
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    await wait_until(lambda: not connection.is_connected)
