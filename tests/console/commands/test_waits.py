"""What commands print after a wait: the outcome rather than the request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from services.console.commands.__main__ import main
from services.console.commands.look import STEPS_POLL_S as POLL_S
from services.console.run.redis_server import RedisServer
from services.protocol.messages import PodStatus
from services.runtime.portal import Portal
from services.store import Store
from services.store.records import ROLES
from tests.api_fuzz.world import TOKENS, endpoints
from tests.support.harness import wait_until

RUN = "waited-for"


@pytest.fixture
def served(tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Portal, Store, list[str]]]:
    """Yield a served run with a live generator, and the options that reach it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRPO_API_TOKEN", TOKENS.operate)
    monkeypatch.setenv("GRPO_REDIS_PASSWORD", server.password)
    portal, world = Portal(), endpoints(tmp_path, server, RUN)
    found = portal.call(world.__aenter__())
    store = portal.call(Store.connect(server.url, RUN, server.password))
    pod = PodStatus("generator", "generator-0", "b00t", "here", 1, found["generator"][0], "ready", 0, 1, {})
    portal.call(store.fleet.beat(pod, 600.0))
    yield portal, store, [RUN, "--redis-url", server.url]
    portal.call(store.close())
    portal.call(world.__aexit__(None, None, None))
    portal.close()


def test_a_drained_generator_has_drained(served: tuple[Portal, Store, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    _, _, run = served
    assert main(["drain", "generator-0", *run, "--why", "a new driver"]) == 0
    assert capsys.readouterr().out.endswith("\ngenerator-0 is draining: it claims no more tickets\n"), "after the pod's log"
    assert main(["drain", "generator-0", *run, "--wait", "5"]) == 0
    assert capsys.readouterr().out.endswith("\ngenerator-0 has drained: no ticket is in progress, and it exits\n")


def test_a_stopped_run_has_ended(served: tuple[Portal, Store, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    portal, store, run = served

    async def end_it() -> None:
        await wait_until(lambda: _stopping(store))
        await store.run.finish("stopped")

    ended = portal.start(end_it())
    assert main(["stop", *run, "--yes", "--wait", "30"]) == 0
    ended.result()
    assert capsys.readouterr().out == f"run {RUN}: ended\n"


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_all_roles_are_asked_before_any_is_waited_for(
    served: tuple[Portal, Store, list[str]], capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    portal, store, run = served
    before, after, asked = (False, True, set(ROLES)) if verb == "pause" else (True, False, set[str]())

    async def prepare() -> None:
        if verb == "resume":
            for role in ROLES:
                await store.run.pause(role, "ada")
        await beat(before)

    async def beat(paused: bool) -> None:
        (pod,) = await store.fleet.members(600.0)
        await store.fleet.beat(msgspec.structs.replace(pod, paused=paused), 600.0)

    async def every_role_is_asked() -> bool:
        await beat(before)
        state = await store.run.state()
        return state is not None and set(state.paused) == asked

    async def comply() -> None:
        await wait_until(every_role_is_asked)
        await beat(after)

    portal.call(prepare())
    complying = portal.start(comply())
    assert main([verb, *run, "--wait", "10"]) == 0, capsys.readouterr().out
    complying.result()
    assert capsys.readouterr().out == f"run {RUN}: generator, dataprep, trainer {verb}d\n"


async def _stopping(store: Store) -> bool:
    state = await store.run.state()
    return state is not None and bool(state.stopping)


def test_smoke_counts_the_steps_before_and_after_a_restore(
    served: tuple[Portal, Store, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    portal, store, run = served

    async def train(*steps: int) -> None:
        for step in steps:
            await store.client.hset(store.keys.run, "committed_step", str(step))
            await asyncio.sleep(3 * POLL_S)

    portal.call(train(40))
    trained = portal.start(train(40, 41, 20, 22))
    assert main(["smoke", *run, "--steps", "500", "--wait", str(12 * POLL_S + 1)]) == 1
    trained.result()
    assert "trained 3 of 500 steps" in capsys.readouterr().err
