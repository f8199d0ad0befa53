"""The Redis users of a run on real servers: each can do its own work and nothing else."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from services.console.run.redis_server import RedisServer
from services.protocol.errors import StoreError
from services.protocol.keys import Keys
from services.store import Store, acl
from services.store.client import Login
from services.store.functions.footprint import footprints
from tests.conftest import SERVERS, skip_without
from tests.support.harness import ticket

RUN = "guarded"
KINDS = tuple(acl.GRANTS)


@pytest.fixture(scope="module", params=SERVERS)
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Yield a server of each kind with the run's users, the functions loaded and a run created."""
    skip_without(request.param)
    server = RedisServer(tmp_path_factory.mktemp(request.param), program=request.param, run=RUN)
    server.start()
    yield server
    server.stop()


def password(server: RedisServer, kind: str) -> str:
    return (server.users / kind).read_text()


def as_user(server: RedisServer, kind: str) -> redis.Redis:
    return redis.Redis(port=server.port, username=acl.user_name(RUN, kind), password=password(server, kind), socket_timeout=10)


def every_command(admin: redis.Redis) -> Iterator[tuple[str, int, set[str]]]:
    """Yield each command's name as ACL rules spell it (`container|sub`), its minimum number of words, and its flags."""
    waiting = list(admin.execute_command("COMMAND").values())
    while waiting:
        info = waiting.pop()
        subcommands = info.get("subcommands") or []
        for sub in subcommands:
            yield sub[0].decode(), abs(sub[1]), {flag.decode() for flag in sub[2]}
        if not subcommands:
            yield info["name"], abs(info["arity"]), set(info["flags"])


@pytest.mark.parametrize("kind", KINDS)
def test_commands_that_are_not_granted_are_rejected(guarded: RedisServer, kind: str) -> None:
    granted = {rule[1:] for rule in acl.rules(RUN, kind) if rule.startswith("+")}
    refused, allowed = 0, set[str]()
    with redis.Redis(port=guarded.port, password=guarded.password) as admin, as_user(guarded, kind) as user:
        for name, words, flags in every_command(admin):
            if "no_auth" in flags:
                continue  # AUTH, HELLO and the like are open to everyone
            if name in granted:
                allowed.add(name)
                continue
            with pytest.raises(redis.exceptions.ResponseError, match=r"no permissions|(DEBUG|MODULE) command not allowed"):
                user.execute_command(*name.split("|"), *["x"] * (words - 1 - name.count("|")))
            refused += 1
    assert refused > 150
    assert granted - allowed <= {"auth", "hello"}, "granted, but unknown to the server"


@pytest.mark.parametrize("kind", KINDS)
def test_other_keys_and_channels_are_rejected(guarded: RedisServer, kind: str) -> None:
    mine, other = Keys(RUN), Keys("another")
    with as_user(guarded, kind) as user:
        assert user.hgetall(mine.run) == {}
        for refused in (
            ("HGETALL", other.run), ("PUBLISH", other.notifications("control"), "control"),
            ("HGETALL", "grpo:{guarded}"[:-1] + "x}:run"), ("FCALL", "grpo_of_somebody", 1, other.prefix),
            ("HGETALL", "anything"),
        ):  # fmt: skip
            with pytest.raises(redis.exceptions.NoPermissionError):
                user.execute_command(*refused)
        own = {"dataprep": {":step", ":replay"}, "trainer": {":step", ":replay", ":metrics"}}
        for key, refused in (
            (":step", ("HSET", mine.step(0), "plan", "x")), (":replay", ("ZADD", mine.replay_order, 0, "0-0")),
            (":metrics", ("XADD", mine.metrics, "*", "m", "x")),
        ):  # fmt: skip
            if key not in own.get(kind, ()):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    user.execute_command(*refused)


async def test_another_services_function_stops_at_its_first_command(guarded: RedisServer) -> None:
    store = await Store.connect(guarded.url, RUN, Login(password(guarded, "dataprep"), acl.user_name(RUN, "dataprep")))
    pod = await Store.connect(guarded.url, RUN, Login(password(guarded, "generator"), acl.user_name(RUN, "generator")))
    try:
        await store.run.create("config", "data", 4, 8)
        fence = await store.run.lead("d", 60)
        assert fence is not None
        with pytest.raises(StoreError, match="denies this user permission"):
            await pod.tickets.issue(fence, 0, [ticket(0)])
        assert await store.tickets.issue(fence, 0, [ticket(0)]) == 1
        with pytest.raises(StoreError, match="denies this user permission"):
            await pod.run.audit()
        assert (await store.run.audit())["tickets"] == 1
        assert (await pod.run.state()) == (await store.run.state())
    finally:
        await store.close()
        await pod.close()
        admin = await Store.connect(guarded.url, RUN, guarded.password)
        await admin.restores.delete_run()
        await admin.close()


async def test_a_user_who_cannot_load_functions_names_who_can(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, run=RUN)
    server.start()
    try:
        store = await Store.connect(server.url, RUN, Login(password(server, "generator"), acl.user_name(RUN, "generator")))
        try:
            with pytest.raises(StoreError, match="does not have the functions of this version yet: start dataprep"):
                await store.fleet.members(1.0)
            admin = await Store.connect(server.url, RUN, Login(password(server, "dataprep"), acl.user_name(RUN, "dataprep")))
            await admin.close()
            assert await store.fleet.members(1.0) == []
        finally:
            await store.close()
    finally:
        server.stop()


def test_access_lists_hold_no_password() -> None:
    secret = uuid.uuid4().hex
    lines = acl.access_list(RUN, secret, dict.fromkeys(KINDS, secret))
    assert secret not in lines
    assert lines.count(acl.digest(secret)) == 1 + len(KINDS)
    assert [line.split()[1] for line in lines.splitlines()] == ["default", *(f"{RUN}.{kind}" for kind in KINDS)]


def test_grants_name_existing_functions() -> None:
    granted = {name for grant in acl.GRANTS.values() for name in grant.functions} | {"beat", "leave", "members", "desire"}
    assert granted == set(footprints()), "every function is granted, and every grant names a function"
