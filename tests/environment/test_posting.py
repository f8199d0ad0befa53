"""Requests to generators: connections persist, replies are complete or errors, and TLS is used as configured."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.environment.posting import NoReply, Posted, Poster
from tests.support.harness import wait_until
from tests.support.servers.certificates import make_certificates


class Served:
    """The state of a server with scripted replies."""

    def __init__(self) -> None:
        self.connections = self.closed = 0
        self.heads: list[str] = []
        self.replies: list[bytes] = []
        self.url = ""


@asynccontextmanager
async def server(per_connection: int = 1000, **options: Any) -> AsyncIterator[Served]:
    """Serve the scripted replies, then echo request bodies. Close each connection after `per_connection` replies."""
    served = Served()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.connections += 1
        try:
            for _ in range(per_connection):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                body = await reader.readexactly(int(head.lower().split("content-length: ")[1].split("\r\n")[0]))
                served.heads.append(head)
                echo = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
                writer.write(served.replies.pop(0) if served.replies else echo)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            served.closed += 1
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, **options)
    scheme = "https" if options.get("ssl") else "http"
    served.url = f"{scheme}://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield served
    finally:
        listening.close()


@asynccontextmanager
async def poster(**options: Any) -> AsyncIterator[Poster]:
    one = Poster("secret", options.pop("trusted", ssl.create_default_context()), **options)
    try:
        yield one
    finally:
        one.close()


async def test_consecutive_requests_share_a_connection() -> None:
    async with server() as served, poster() as one:
        for number in range(5):
            assert await one.post(served.url, "/v1/generate", b"x" * number) == Posted(200, b"x" * number)
        assert served.connections == 1
        assert served.heads[0].startswith("POST /v1/generate HTTP/1.1\r\n")
        assert "Authorization: Bearer secret\r\n" in served.heads[0]
        one.close()
        await wait_until(lambda: served.closed == 1)


async def test_concurrent_requests_use_separate_connections() -> None:
    async with server() as served, poster() as one:
        bodies = [b"%d" % number * 100_000 for number in range(5)]
        found = await asyncio.gather(*(one.post(served.url, "/", body) for body in bodies))
        assert [each.body for each in found] == bodies
        assert served.connections == 5


async def test_a_closed_connection_is_replaced() -> None:
    async with server(per_connection=2) as served, poster() as one:
        for number in range(6):
            assert (await one.post(served.url, "/", b"%d" % number)).body == b"%d" % number
        assert served.connections == 3


@pytest.mark.parametrize(
    "reply",
    [
        b"", b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", b"HTTP/1.1 abc OK\r\nContent-Length: 1\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
    ],
)  # fmt: skip
async def test_an_incomplete_reply_is_an_error(reply: bytes) -> None:
    async with server(per_connection=1) as served, poster() as one:
        served.replies = [reply]
        with pytest.raises(NoReply):
            await one.post(served.url, "/", b"x")


async def test_error_statuses_are_returned_and_refused_connections_raise() -> None:
    async with server() as served, poster() as one:
        served.replies = [b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\nconnection: close\r\n\r\nlate"]
        assert await one.post(served.url, "/", b"") == Posted(503, b"late")
        assert (await one.post(served.url, "/", b"again")).body == b"again"
        assert served.connections == 2
        url = served.url
    async with poster() as one:
        with pytest.raises(NoReply, match="ConnectionRefusedError"):
            await one.post(url, "/", b"")


async def test_a_cancelled_call_closes_its_connection() -> None:
    async with server() as served, poster() as one:
        served.replies = [b"HTTP/1.1 200 OK\r\n"]  # without anything else
        asking = asyncio.create_task(one.post(served.url, "/", b""))
        await wait_until(lambda: served.heads)
        assert served.closed == 0
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await wait_until(lambda: served.closed == 1)
        assert (await one.post(served.url, "/", b"next")).body == b"next"
        assert served.connections == 2


async def test_connections_to_servers_that_have_gone_are_closed() -> None:
    async with server() as here, server() as gone, poster() as one:
        for url in (here.url, gone.url):
            await one.post(url, "/", b"x")
        one.keep_only([here.url])
        await wait_until(lambda: gone.closed == 1)
        await one.post(here.url, "/", b"x")
        assert (here.connections, here.closed) == (1, 0)


async def test_the_tls_certificate_is_verified(tmp_path: Path) -> None:
    made = make_certificates(tmp_path, "DNS:pods")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made.certificate, made.key)
    trusted = ssl.create_default_context(cafile=str(made.authority))
    async with server(ssl=context) as served:
        async with poster(trusted=trusted, server_name="pods") as one:
            assert (await one.post(served.url, "/", b"x")).body == b"x"
        async with poster(trusted=trusted) as one:
            with pytest.raises(NoReply, match="CERTIFICATE_VERIFY_FAILED"):
                await one.post(served.url, "/", b"x")
