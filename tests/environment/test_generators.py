"""Requests to generators: connections persist, incomplete replies are asked for again, and TLS is used as configured."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from services.environment import generators
from services.environment.generators import GeneratorFleet
from services.groups.generated import Generated, GenerationFailed, SamplingParameters
from services.groups.records import pack_partial
from services.http.credentials import API_TOKEN_ENV
from services.protocol.messages import PodStatus, Span
from services.runtime.loops import Loop, end_tasks
from tests.support.harness import wait_until
from tests.support.servers.certificates import make_certificates

SAMPLING = SamplingParameters(4)
DONE = pack_partial([Generated(np.array([1, 2], np.int32), np.zeros(2, np.float32), [Span(0, 0, 2)], "stop")])


def reply(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


class Served:
    """The state of a generator with scripted replies."""

    def __init__(self) -> None:
        self.connections = self.closed = 0
        self.heads: list[str] = []
        self.replies: list[bytes] = []
        self.url = ""


@asynccontextmanager
async def server(**options: Any) -> AsyncIterator[Served]:
    """Serve the scripted replies, then finished completions."""
    served = Served()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
                served.heads.append(head)
                said = served.replies.pop(0) if served.replies else reply(DONE)
                writer.write(said)
                if said.endswith(b"!"):
                    break
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
async def fleet(served: Served, monkeypatch: pytest.MonkeyPatch, **api: str) -> AsyncIterator[GeneratorFleet]:
    """Yield a fleet of the one generator."""
    monkeypatch.setenv(API_TOKEN_ENV, "secret")
    monkeypatch.setattr(generators, "AVOID_S", 0.05)
    pod = PodStatus("generator", "generator-0", "boot", "host", 1, served.url, "ready", 0, 1, {})
    given = {"ca_file": "", "certificate_file": "", "token_file": "", "read_token_file": "", **api}
    config = SimpleNamespace(api=SimpleNamespace(**given), fleet=SimpleNamespace(ttl_s=1.0))

    async def members(ttl_s: float) -> list[PodStatus]:
        return [pod]

    async def wait(topic: str, timeout: float) -> None:
        await asyncio.sleep(0.05)

    store, notifications = SimpleNamespace(fleet=SimpleNamespace(members=members)), SimpleNamespace(wait=wait)
    made = GeneratorFleet(cast(Any, SimpleNamespace(config=config, store=store, notifications=notifications)))
    following = asyncio.create_task(made.follow(Loop("fleet", cast(Any, None), 60.0)))
    try:
        yield made
    finally:
        await end_tasks([following])
        await made.close()


async def sampled(one: GeneratorFleet) -> list[int]:
    return (await one.sample("0.0", [5], 7, SAMPLING)).tokens.tolist()


async def test_consecutive_requests_share_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with server() as served:
        async with fleet(served, monkeypatch) as one:
            for _ in range(5):
                assert await sampled(one) == [1, 2]
            assert served.connections == 1
            assert served.heads[0].startswith("post /v1/generate http/1.1\r\n")
            assert "authorization: bearer secret\r\n" in served.heads[0]
        await wait_until(lambda: served.closed == 1)


async def test_incomplete_replies_and_refusals_for_now_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with server() as served, fleet(served, monkeypatch) as one:
        served.replies = [
            b"garbage\r\n\r\n!", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n!", b"HTTP/1.1 abc OK\r\n\r\n!",
            reply(b"late", "503 Busy"),
        ]  # fmt: skip
        assert await sampled(one) == [1, 2]
        assert len(served.heads) == 5


async def test_a_request_that_is_refused_for_good_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async with server() as served, fleet(served, monkeypatch) as one:
        served.replies = [reply(b"too long", "422 No")]
        with pytest.raises(GenerationFailed, match="generator-0 refused the request: too long"):
            await sampled(one)


async def test_a_cancelled_request_closes_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with server() as served, fleet(served, monkeypatch) as one:
        served.replies = [b"HTTP/1.1 200 OK\r\n"]  # without anything else
        asking = asyncio.create_task(sampled(one))
        await wait_until(lambda: served.heads)
        assert served.closed == 0
        await end_tasks([asking])
        await wait_until(lambda: served.closed == 1)
        assert await sampled(one) == [1, 2]
        assert served.connections == 2


async def test_the_tls_certificate_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_certificates(tmp_path, "DNS:pods")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made.certificate, made.key)
    async with server(ssl=context) as served:
        trusted = {"ca_file": str(made.authority), "certificate_file": str(made.certificate)}
        async with fleet(served, monkeypatch, **trusted) as one:
            assert await sampled(one) == [1, 2]
        async with fleet(served, monkeypatch, ca_file=str(made.authority)) as one:  # the certificate is not for 127.0.0.1
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(sampled(one), 1.0)
        assert len(served.heads) == 1
