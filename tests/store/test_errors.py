"""An unreachable, misconfigured or full Redis causes a one-line error within seconds; one that comes back causes none."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis

from services.console.run.redis_server import RedisServer
from services.operations.inspection.ledger import audit
from services.protocol.errors import StoreError
from services.protocol.keys import Keys
from services.store import Store, client
from services.store.client import Login, shown
from services.store.connection import Connection
from tests.support import flow
from tests.support.harness import ticket, wait_until
from tests.support.servers.certificates import make_certificates

LIMIT_S = 20.0
RUN = "errors"


async def refusal(url: str, password: str | None = None) -> str:
    """Return the one-line error of a connection attempt, which must fail within the time limit."""
    started = time.monotonic()
    with pytest.raises(StoreError) as caught:
        await asyncio.wait_for(Store.connect(url, RUN, password), LIMIT_S)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - started < LIMIT_S
    return str(caught.value)


@asynccontextmanager
async def fake_server(
    answer: Callable[[bytes], bytes], encrypted: ssl.SSLContext | None = None, path: str = ""
) -> AsyncIterator[str]:
    """Yield the address of a fake server, on TCP or a socket file, that replies to each command with `answer(command name)`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while header := await reader.readline():
                words = []
                for _ in range(int(header[1:])):
                    size = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(size + 2))[:-2])
                writer.write(answer(words[0].upper()))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    if path:
        async with await asyncio.start_unix_server(serve, path):
            yield f"unix://{path}"
        return
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=encrypted)
    async with server:
        yield f"redis{'s' * bool(encrypted)}://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"


@pytest.mark.parametrize("way", ["tcp", "tls", "socket"])
async def test_a_replica_is_awaited_until_it_is_the_master(way: str, tmp_path: Path) -> None:
    """The replica is promoted as in a failover without a cluster, and every kind of connection waits for it."""
    replies = [b"-READONLY You can't write against a read only replica.\r\n"] * 2 + [b":1\r\n"]
    context, login = None, Login()
    if way == "tls":
        if not shutil.which("openssl"):
            pytest.skip("no openssl to make certificates with")
        made = make_certificates(tmp_path)
        context, login = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), Login(ca_file=str(made.authority))
        context.load_cert_chain(made.certificate, made.key)
    path = str(tmp_path / "redis.sock") if way == "socket" else ""
    async with fake_server(lambda command: replies.pop(0) if command == b"HSET" else b"+OK\r\n", context, path) as url:
        connection = Connection(Keys("run"), url, login)
        try:
            assert await connection.send(("HSET", "k", "f", "v")) == [1]
        finally:
            await connection.close()


async def test_an_unreachable_server_is_reported() -> None:
    message = await refusal("redis://127.0.0.1:1/0")
    assert message.startswith("Redis at redis://127.0.0.1:1/0 cannot be reached")
    assert message.endswith("check that it is running and that redis.url is right")


async def test_an_unknown_host_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:  # replaces a real lookup, which may be slow
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert "cannot be reached" in await refusal("redis://no-such-host.invalid:6379/0")


async def test_a_server_without_hello_is_reported_as_too_old() -> None:
    async with fake_server(lambda command: b"-ERR unknown command\r\n") as url:
        assert await refusal(url) == f"Redis at {url} answers 'unknown command': run Redis 7.0 or newer, or Valkey"


async def test_a_silent_port_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PROBE_TIMEOUT_S", 0.2)
    async with fake_server(lambda command: b"") as url:
        assert "cannot be reached" in await refusal(url)


@pytest.mark.parametrize("way", ["tcp", "password", "only the password", "socket"])
async def test_a_server_that_hangs_is_an_error_in_time(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All attempts together are limited, however many of them the rule would allow."""
    for name, seconds in (("CONNECT_TIMEOUT_S", 0.5), ("REPLY_TIMEOUT_S", 1.0), ("AGAIN_S", 0.5)):
        monkeypatch.setattr(client, name, seconds)
    accepted = [b"+OK\r\n"] if way == "only the password" else []
    path = str(tmp_path / "redis.sock") if way == "socket" else ""
    async with fake_server(lambda command: accepted.pop() if accepted else b"", path=path) as url:
        connection = Connection(Keys("run"), url, Login("secret" if "password" in way else ""))
        started = time.monotonic()
        try:
            with pytest.raises(StoreError, match=r"cannot be reached \(no answer for 1\.5 s\)"):
                await asyncio.wait_for(connection.send(("PING",)), LIMIT_S)
        finally:
            await connection.close()
        assert 1.0 < time.monotonic() - started < 4.0


async def test_a_port_of_another_protocol_is_reported() -> None:
    async with fake_server(lambda command: b"HTTP/1.1 400 Bad Request\r\n\r\n") as url:
        assert f"Redis at {url} cannot be" in await refusal(url)


@pytest.mark.parametrize("url", ["", "localhost:6379", "http://localhost", "redis://localhost:port/0"])
async def test_an_invalid_address_is_rejected(url: str) -> None:
    assert f"redis.url = {url!r} is not a Redis address" in await refusal(url)


async def test_a_server_without_functions_is_reported_as_too_old() -> None:
    def answer(command: bytes) -> bytes:
        if command == b"INFO":
            text = b"# Server\r\nredis_version:6.2.14\r\nredis_mode:standalone\r\n"
            return b"$%d\r\n%s\r\n" % (len(text), text)
        if command == b"CONFIG":
            return b"%1\r\n$16\r\nmaxmemory-policy\r\n$10\r\nnoeviction\r\n"
        return b"%1\r\n$5\r\nproto\r\n:3\r\n" if command == b"HELLO" else b"+OK\r\n"

    async with fake_server(answer) as url:
        assert await refusal(url) == (f"Redis at {url} is 6.2.14, which has no Functions: run Redis 7.0 or newer, or Valkey")


@pytest.mark.parametrize("password", [None, "wrong"])
async def test_a_wrong_password_is_reported(server: RedisServer, password: str | None) -> None:
    message = await refusal(server.url, password)
    assert "rejected the password: set redis.password_file or GRPO_REDIS_PASSWORD" in message


async def test_a_password_in_the_address_is_not_shown(server: RedisServer) -> None:
    message = await refusal(server.url.replace("//", "//:hunter2@"))
    assert "hunter2" not in message
    assert f"Redis at {server.url} rejected the password" in message


async def test_an_eviction_policy_is_rejected(server: RedisServer) -> None:
    with redis.Redis(port=server.port, password=server.password) as admin:
        admin.config_set("maxmemory-policy", "allkeys-lru")
        try:
            message = await refusal(server.url, server.password)
        finally:
            admin.config_set("maxmemory-policy", "noeviction")
    assert "has maxmemory-policy allkeys-lru, which may delete a run's state: set it to noeviction" in message


async def test_a_user_without_config_rights_can_work(server: RedisServer) -> None:
    with redis.Redis(port=server.port, password=server.password) as admin:
        admin.execute_command("ACL", "SETUSER", "tenant", "on", ">secret", "~*", "&*", "+@all", "-config")
        try:
            store = await Store.connect(server.url.replace("//", "//tenant:secret@"), RUN)
            assert await store.run.state() is None
            await store.close()
        finally:
            admin.acl_deluser("tenant")


async def test_a_full_server_reports_it_and_still_drains(store: Store, server: RedisServer) -> None:
    """Calls that add data are rejected; calls that advance work and so free memory succeed."""
    team = await flow.start(store)
    await flow.buffer(store, team, 2)
    (group,) = await flow.oldest_groups(store, 1)
    await flow.issue(store, team, 2)
    one, two = await flow.claim(store, "g", 2)
    await store.client.config_set("maxmemory", "1mb")
    try:
        with pytest.raises(StoreError, match="is full: raise its maxmemory"):
            await flow.submit(store, "g", one)
        with pytest.raises(StoreError, match="is full"):
            await flow.issue(store, team, 1)
        assert await store.tickets.restart_rollout("g", two, 0, 1, 60), "which deletes its turns"
        assert await store.tickets.release("g", two)
        await flow.prepare(store, team, 0, [group.group])
        assert await store.steps.commit(team.trainer, 0)
        await store.monitor.record({"step": 0.0})
        assert await store.steps.publish(team.trainer, 1)
        await store.steps.checkpointed(team.trainer, 0)
        assert await store.steps.retire() == 1
    finally:
        await store.client.config_set("maxmemory", "0")
    assert await flow.submit(store, "g", one), "the claim is still held"
    assert (await audit(store)).messages == ()


async def test_lost_functions_are_reloaded(store: Store) -> None:
    """They are lost after FUNCTION FLUSH, or when an empty server replaces the old one."""
    team = await flow.start(store)
    await flow.issue(store, team, 1)
    (one,) = await flow.claim(store, "g")
    await store.client.execute_command("FUNCTION", "FLUSH")
    assert await flow.submit(store, "g", one)
    assert (await store.run.audit())["headers"] == 1


async def test_auditing_a_missing_run_is_an_error(store: Store) -> None:
    with pytest.raises(StoreError, match=r"there is no run 't-.*' on this Redis"):
        await audit(store)


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[RedisServer]:
    """Yield a server to kill, which fsyncs every write."""
    server = RedisServer(tmp_path, appendfsync="always")
    server.start()
    yield server
    server.kill()


async def test_work_survives_kills_of_the_server_without_loss(durable: RedisServer) -> None:
    """The server is killed with kill -9 during calls and restarted on the same folder; the calls wait, retry and succeed."""
    store = await Store.connect(durable.url, RUN, durable.password)
    team = await flow.start(store, slots=1000, steps=1000)
    submitted: list[str] = []
    busy = True

    async def issue_tickets() -> None:
        while busy:
            state = await store.run.state()
            assert state is not None
            await store.tickets.issue(team.leader, state.cursor, [ticket(seq) for seq in range(state.cursor, state.cursor + 4)])
            await asyncio.sleep(0.01)

    async def generate(name: str) -> None:
        while busy:
            claims = await flow.claim(store, name, 2, lease_s=0.5)
            submitted.extend([one.ticket_id for one in claims if await flow.submit(store, name, one)])
            await asyncio.sleep(0.005)

    async with asyncio.TaskGroup() as tasks:
        for body in (issue_tickets(), generate("a"), generate("b")):
            tasks.create_task(body)
        for kills in range(1, 4):
            await wait_until(lambda enough=8 * kills: len(submitted) >= enough)
            durable.kill()
            await asyncio.sleep(0.1)
            await asyncio.to_thread(durable.start)
        await wait_until(lambda: len(submitted) > 32)
        busy = False

    report = await audit(store)
    assert report.messages == ()
    items = [item.ticket for item in await store.replay.read_headers(team.leader, 100_000)]
    assert len(items) == len(set(items)), "no group was stored twice"
    assert sorted(submitted) == sorted(items), "exactly the acknowledged groups are stored"
    assert len(items) > 32
    for item in await store.replay.read_headers(team.leader, 100_000):
        assert (await store.steps.payloads([item.payload]))[item.payload].tokens.size > 0
    await store.close()


async def test_a_server_that_stays_down_is_an_error_eventually(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RETRIES", 4)
    server = RedisServer(tmp_path)
    server.start()
    store = await Store.connect(server.url, RUN, server.password)
    await store.run.create("config", "data", 1, 1)
    server.kill()
    started = time.monotonic()
    calls = (store.run.state(), store.run.audit(), store.tickets.order(), store.replay.groups(["0-1"]))
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, StoreError) and "cannot be reached" in str(outcome) for outcome in outcomes), outcomes
    assert time.monotonic() - started < LIMIT_S
    await store.close()


@pytest.mark.parametrize("url", ["redis://:p@ss@host:6379/0", "redis://user:p/a@ss@host:6379/0", "redis://user:pass@host:6379/0"])
def test_no_part_of_a_password_is_shown(url: str) -> None:
    assert shown(url) == "redis://host:6379/0"
