"""The fast connection returns the same replies as redis-py, whatever their size and whatever happens to the server."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
import subprocess
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from redis.exceptions import AuthenticationError, ConnectionError, OutOfMemoryError, TimeoutError

from services.console.run.redis_server import RedisServer
from services.store import Store
from services.store.connection.base import Connection, _replies
from services.store.connection.client import Login, make_client
from services.store.connection.fast_connection import APART_BYTES, BUFFER_BYTES, PIECES, ErrorReply, FastConnection, redis_error
from services.store.connection.login import VANISHED
from tests.support import flow

SIZES = (0, 1, APART_BYTES - 1, APART_BYTES, BUFFER_BYTES - 2, BUFFER_BYTES, 3 * BUFFER_BYTES + 7)


def wire_to(url: str, password: str | None = None, retries: int = 3) -> FastConnection:
    """Return a separate connection that makes few and quick retries."""
    client = make_client(url, Login(password or ""))
    client.connection_pool.connection_kwargs |= {"retry": Retry(ConstantBackoff(0.01), retries), "socket_timeout": 30.0}
    wire = FastConnection.beside(client)
    assert wire is not None
    return wire


@pytest_asyncio.fixture
async def wire(any_server: RedisServer) -> AsyncIterator[FastConnection]:
    wire = wire_to(any_server.url, any_server.password)
    yield wire
    await wire.ask([("FLUSHALL",)])
    wire.close()


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[str]:
    """Yield the address of a server that sends the n-th connection the n-th of `answers` byte by byte, then closes it."""
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        for byte in left.pop(0) if left else b"":
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"


async def test_strings_of_any_size_round_trip(wire: FastConnection) -> None:
    values = {f"k{size}": np.random.default_rng(size).bytes(size) for size in SIZES}
    replies = await wire.ask([("SET", key, value) for key, value in values.items()])
    assert replies == [b"OK"] * len(SIZES)
    assert await wire.ask([("MGET", *values, "none")]) == [[*values.values(), None]]
    assert await wire.ask([("STRLEN", key) for key in values]) == list(SIZES)


async def test_a_command_may_exceed_one_system_call(wire: FastConnection) -> None:
    values = [bytes([i % 256]) * APART_BYTES for i in range(PIECES)]
    assert await wire.ask([("SET", i, value) for i, value in enumerate(values)]) == [b"OK"] * PIECES
    assert await wire.ask([("MGET", *range(PIECES))]) == [values]


async def test_replies_of_every_type_are_parsed(wire: FastConnection) -> None:
    replies = await wire.ask([
        ("ZADD", "z", 0.5, "a", 2, "b"),
        ("INCR", "z"),
        ("EVAL", "return {1, {'x', {}}, false, redis.status_reply('fine')}", 0),
        ("ZRANGE", "z", 0, -1, "WITHSCORES"),
    ])  # fmt: skip
    error = replies.pop(1)
    assert isinstance(error, ErrorReply)
    assert error.word == "WRONGTYPE"
    assert replies == [2, [1, [b"x", []], None, b"fine"], [b"a", b"0.5", b"b", b"2"]]


@pytest.mark.parametrize("part", ["é", 0, -7, 2**63 - 1, 0.1, 1e-320, 1e22, -0.0, math.inf, b"\0\xff", b"\r\n"])
async def test_arguments_next_to_a_long_string_are_unchanged(wire: FastConnection, part: str | float | bytes) -> None:
    long = bytes(APART_BYTES)
    replies = await wire.ask([("RPUSH", "l", part), ("RPUSH", "l", part, long, part, long), ("LRANGE", "l", 0, -1)])
    alone, *beside = replies[-1]
    assert beside == [alone, long, alone, long]
    assert alone == (part if isinstance(part, bytes) else str(part).encode())


async def test_an_unencodable_command_is_not_sent(wire: FastConnection) -> None:
    for command in (("SET", "k", None), ("SET", "k", bytes(APART_BYTES), None)):
        with pytest.raises(TypeError):
            await wire.ask([command])
    assert await wire.ask([("EXISTS", "k")]) == [0]


async def test_a_cancelled_request_leaves_no_half_read_connection(wire: FastConnection) -> None:
    await wire.ask([("PING",)])
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(wire.ask([("BLPOP", "none", 1)]), 0.05)
    assert await wire.ask([("ECHO", "after")]) == [b"after"]


async def test_concurrent_requests_get_their_own_answers(wire: FastConnection) -> None:
    words = [str(i) * 3000 for i in range(40)]
    assert await asyncio.gather(*(wire.ask([("ECHO", word)]) for word in words)) == [[word.encode()] for word in words]


async def test_credentials_and_database_in_the_url_are_used(any_server: RedisServer) -> None:
    admin = wire_to(any_server.url, any_server.password)
    await admin.ask([("ACL", "SETUSER", "tenant", "on", ">secret", "~*", "+@all")])
    tenant = wire_to(any_server.url.replace("//", "//tenant:secret@").replace("/0", "/3"))
    try:
        assert await tenant.ask([("ACL", "WHOAMI"), ("SET", "here", 1)]) == [b"tenant", b"OK"]
        assert await admin.ask([("EXISTS", "here"), ("SELECT", 3), ("EXISTS", "here"), ("FLUSHALL",)]) == [0, b"OK", 1, b"OK"]
    finally:
        await admin.ask([("ACL", "DELUSER", "tenant")])
        admin.close()
        tenant.close()


@pytest.mark.parametrize("password", [None, "wrong"])
async def test_a_wrong_password_is_reported_at_once(any_server: RedisServer, password: str | None) -> None:
    wire = wire_to(any_server.url, password)
    if password is None:
        (reply,) = await wire.ask([("PING",)])
        assert isinstance(redis_error(reply), AuthenticationError)
    else:
        with pytest.raises(AuthenticationError):
            await wire.ask([("PING",)])
    wire.close()


async def test_a_full_server_is_an_out_of_memory_error(wire: FastConnection) -> None:
    await wire.ask([("CONFIG", "SET", "maxmemory", "1")])
    (reply,) = await wire.ask([("SET", "k", "v")])
    await wire.ask([("CONFIG", "SET", "maxmemory", "0")])
    assert isinstance(redis_error(reply), OutOfMemoryError)


async def test_a_request_survives_a_restart_of_the_server(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    wire = wire_to(server.url, server.password, retries=10_000)
    await asyncio.gather(*(wire.ask([("PING",)]) for _ in range(5)))  # opens five connections, all of which will break
    server.kill()
    waiting = asyncio.create_task(wire.ask([("ECHO", "back")]))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(server.start)
    assert await waiting == [b"back"]
    wire.close()
    server.stop()


async def test_a_reply_that_arrives_byte_by_byte_is_read() -> None:
    async with answering(b"*3\r\n$3\r\nabc\r\n:-5\r\n$-1\r\n") as url:
        with closing(wire_to(url)) as wire:
            assert await wire.ask([("ANY",)]) == [[b"abc", -5, None]]


async def test_a_server_that_is_loading_is_awaited() -> None:
    async with answering(b"-LOADING it reads the dataset\r\n", b"+PONG\r\n") as url:
        with closing(wire_to(url)) as wire:
            assert await wire.ask([("PING",)]) == [b"PONG"]


async def test_a_connection_broken_in_mid_reply_is_reopened() -> None:
    async with answering(b"$5\r\nhal", b"$4\r\nfull\r\n") as url:
        with closing(wire_to(url)) as wire:
            assert await wire.ask([("GET", "k")]) == [b"full"]


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n", b"$x\r\n", b"*1\r\n?\r\n", b"$99999999999\r\n"])
async def test_a_malformed_reply_is_a_connection_error(answer: bytes) -> None:
    async with answering(*[answer] * 4) as url:
        with pytest.raises(ConnectionError):
            await wire_to(url, retries=2).ask([("GET", "k")])


async def test_a_silent_server_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        wire = wire_to(f"redis://127.0.0.1:{silent.getsockname()[1]}/0", retries=0)
        wire._settings["socket_timeout"] = 0.1
        started = time.monotonic()
        with pytest.raises(TimeoutError, match=r"no answer for 0\.1 s"):
            await wire.ask([("PING",)])
        assert time.monotonic() - started < 20


async def test_an_unreachable_server_is_a_connection_error() -> None:
    with pytest.raises(ConnectionError):
        await wire_to("redis://localhost:1/0", retries=1).ask([("PING",)])


def certificate(folder: Path) -> tuple[Path, Path]:
    """Return the paths of a certificate for 127.0.0.1 and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=x",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


@asynccontextmanager
async def tls_proxy(port: int, folder: Path) -> AsyncIterator[str]:
    """Yield the address of a TLS proxy in front of a server."""
    cert, key = certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        except (ConnectionError, OSError):
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"rediss://127.0.0.1:{server.sockets[0].getsockname()[1]}/0?ssl_ca_certs={cert}"


async def life_of_groups(store: Store) -> None:
    """Take groups from their claims to their fetched payloads over the store's connection."""
    team = await flow.start(store)
    await flow.issue(store, team, 3)
    claims = await flow.claim(store, "g", 3)
    assert all(await asyncio.gather(*(flow.submit(store, "g", one) for one in claims)))
    assert await flow.settle(store, team) == 3
    fetched = await store.steps.payloads([one.payload for one in claims])
    assert {name: int(payload.tokens[0]) for name, payload in fetched.items()} == {
        one.payload: one.fence % 1000 for one in claims
    }


async def replies_are_as_a_wire_s(store: Store, server: RedisServer) -> None:
    """Check that redis-py's replies are not converted, for every command that snapshots and restores use."""
    keys = store.keys
    wire = wire_to(server.url, server.password)
    asked: list[tuple[Any, ...]] = [
        ("HGETALL", keys.run), ("HMGET", keys.run, "slots", "nothing"), ("LRANGE", keys.departed, 0, -1),
        ("ZRANGE", keys.replay_order, 0, -1, "WITHSCORES"), ("ZSCORE", keys.replay_order, "0-0"),
        ("ZMSCORE", keys.replay_order, "0-0", "nobody"), ("HSCAN", keys.ledger, 0), ("XRANGE", keys.tickets, "-", "+"),
        ("XPENDING", keys.headers, "dataprep"), ("GET", "nothing"), ("ZSCORE", keys.run, "0-0"),
    ]  # fmt: skip
    try:
        for commands in (asked, *([command] for command in asked[:-1])):  # all in one pipeline, then one by one
            assert [str(one) for one in await _replies(plain(store), commands)] == [str(one) for one in await wire.ask(commands)]
    finally:
        wire.close()


def plain(store: Store) -> aioredis.Redis:
    assert store.connection._plain is not None
    return store.connection._plain


async def test_tls_uses_no_fast_connection(server: RedisServer, tmp_path: Path) -> None:
    async with tls_proxy(server.port, tmp_path) as url:
        store = await Store.connect(url, f"t-{uuid.uuid4().hex[:12]}", server.password)
        assert store.connection._fast is None
        await life_of_groups(store)
        await replies_are_as_a_wire_s(store, server)
        await store.restores.delete_run()
        await store.close()


def test_a_unix_socket_uses_no_fast_connection() -> None:
    assert FastConnection.beside(make_client("unix:///run/redis.sock", Login())) is None


async def test_stores_of_one_client_share_a_fast_connection(any_store: Store) -> None:
    assert any_store.connection._fast is not None
    assert Store(Connection(any_store.client, any_store.keys)).connection._fast is any_store.connection._fast
    await life_of_groups(any_store)


async def test_both_connections_detect_a_vanished_host(any_server: RedisServer) -> None:
    wire, client = wire_to(any_server.url, any_server.password), make_client(any_server.url, Login(any_server.password))
    await wire.ask([("PING",)])
    other: Any = await client.connection_pool.get_connection()
    for sock in (wire._idle[0]._sock, other._writer.get_extra_info("socket")):
        assert {option: sock.getsockopt(socket.IPPROTO_TCP, option) for option in VANISHED} == VANISHED
    await client.connection_pool.release(other)
    await client.aclose()
    wire.close()
