"""A connection returns replies as the server sent them, whatever happens to the server meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from services.console.run.redis_server import RedisServer
from services.protocol.errors import StoreError
from services.protocol.keys import Keys
from services.store import Store, client
from services.store.client import VANISHED, Login
from services.store.connection import Connection
from tests.support import flow


def connection_to(url: str, password: str = "") -> Connection:
    return Connection(Keys("wire"), url, Login(password))


@pytest_asyncio.fixture
async def line(server: RedisServer) -> AsyncIterator[Connection]:
    line = connection_to(server.url, server.password)
    yield line
    await line.send(("FLUSHALL",))
    await line.close()


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[Connection]:
    """Yield a connection to a server that sends the n-th connection the n-th of `answers` byte by byte, then closes it."""
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        with contextlib.suppress(ConnectionError):  # the client may close it first
            for byte in left.pop(0) if left else b"":
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        line = connection_to(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
        try:
            yield line
        finally:
            await line.close()


async def test_strings_of_any_size_round_trip(line: Connection) -> None:
    values = {f"k{size}": np.random.default_rng(size).bytes(size) for size in (0, 1, 2**13, 2**18 - 2, 2**18, 3 * 2**18 + 7)}
    assert await line.send(*[("SET", key, value) for key, value in values.items()]) == [b"OK"] * len(values)
    assert await line.send(("MGET", *values, "none")) == [[*values.values(), None]]


async def test_replies_are_returned_as_sent(line: Connection) -> None:
    replies = await line.send(
        ("ZADD", "z", 0.5, "a", 2, "b"),
        ("EVAL", "return {1, {'x', {}}, false, redis.status_reply('fine')}", 0),
        ("ZRANGE", "z", 0, -1, "WITHSCORES"),
        ("HSET", "h", "f", "v"),
        ("HGETALL", "h"),
    )
    assert replies == [2, [1, [b"x", []], None, b"fine"], [b"a", b"0.5", b"b", b"2"], 1, [b"f", b"v"]]
    with pytest.raises(StoreError, match="WRONGTYPE"):
        await line.send(("SET", "k", "v"), ("INCR", "z"))
    with pytest.raises(StoreError, match="WRONGTYPE"):
        await line.at_once(("SET", "k", "w"), ("INCR", "z"))
    assert await line.send(("GET", "k")) == [b"w"]


async def test_plain_commands_return_values(line: Connection) -> None:
    await line.send(("HSET", "h", "f", "v"), ("ZADD", "z", 0.5, "a"), ("XADD", "x", "1-1", "f", "v"))
    assert await line.ask(line.client.hgetall("h")) == {b"f": b"v"}
    assert await line.ask(line.client.hmget("h", "f", "none")) == [b"v", None]
    assert await line.ask(line.client.zrange("z", 0, -1, withscores=True)) == [(b"a", 0.5)]
    assert await line.ask(line.client.zmscore("z", ["a", "none"])) == [0.5, None]
    assert await line.ask(line.client.xrange("x")) == [(b"1-1", {b"f": b"v"})]
    assert await line.ask(line.client.hscan("h", 0, count=10)) == (0, {b"f": b"v"})


async def test_a_cancelled_request_leaves_no_half_read_connection(line: Connection) -> None:
    await line.send(("PING",))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(line.send(("BLPOP", "none", 1)), 0.05)
    assert await line.send(("ECHO", "after")) == [b"after"]


async def test_concurrent_requests_get_their_own_answers(line: Connection) -> None:
    words = [str(i).encode() * 3000 for i in range(150)]
    assert await asyncio.gather(*(line.send(("ECHO", word)) for word in words)) == [[word] for word in words]


async def test_credentials_and_database_in_the_url_are_used(line: Connection, server: RedisServer) -> None:
    await line.send(("ACL", "SETUSER", "tenant", "on", ">secret", "~*", "+@all"))
    tenant = connection_to(server.url.replace("//", "//tenant:secret@").replace("/0", "/3"))
    try:
        assert await tenant.send(("ACL", "WHOAMI"), ("SET", "here", 1)) == [b"tenant", b"OK"]
        assert await line.send(("EXISTS", "here"), ("SELECT", 3), ("EXISTS", "here"), ("FLUSHALL",)) == [0, b"OK", 1, b"OK"]
    finally:
        await line.send(("ACL", "DELUSER", "tenant"))
        await tenant.close()


async def test_a_server_that_is_loading_is_awaited() -> None:
    async with answering(b"-LOADING it reads the dataset\r\n", b"+PONG\r\n") as line:
        assert await line.send(("PING",)) == [b"PONG"]


async def test_a_connection_broken_in_mid_reply_is_reopened() -> None:
    async with answering(b"$5\r\nhal", b"$4\r\nfull\r\n") as line:
        assert await line.send(("GET", "k")) == [b"full"]


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n", b"*1\r\n?\r\n"])
async def test_a_malformed_reply_is_an_error(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RETRIES", 2)
    async with answering(*[answer] * 4) as line:
        with pytest.raises(StoreError):
            await line.send(("GET", "k"))


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


async def test_a_run_works_over_tls(server: RedisServer, tmp_path: Path) -> None:
    async with tls_proxy(server.port, tmp_path) as url:
        store = await Store.connect(url, f"t-{uuid.uuid4().hex[:12]}", server.password)
        await life_of_groups(store)
        await store.restores.delete_run()
        await store.close()


async def test_a_vanished_host_is_detected(line: Connection) -> None:
    await line.send(("PING",))
    other: Any = await line.client.connection_pool.get_connection()
    sock = other._writer.get_extra_info("socket")
    assert {option: sock.getsockopt(socket.IPPROTO_TCP, option) for option in VANISHED} == VANISHED
    await line.client.connection_pool.release(other)
