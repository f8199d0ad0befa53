"""Pausing generators: each mode handles requests as documented, nothing is lost, and the pod reports when it is paused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from services.console.run.redis_server import RedisServer
from services.generator.loop import GeneratorLoop
from services.generator.metrics import GeneratorMetrics
from services.http.entry import open_service
from services.protocol.messages import Round
from services.runtime.service import Service
from services.store import Store
from services.weights.rounds.member import WeightFollower
from tests.support import flow
from tests.support.harness import PlainTokenizer, small_config, ticket, wait_until
from tests.support.rounds_world import AnyVerifier
from tests.support.scripted import ScriptedEngine, scripted_tokens

TOKEN = {"Authorization": "Bearer test-token"}
SLOW = ("generator.engine_options.token_s=0.15", "sampling.max_tokens=24", "generator.drain_s=0")


@dataclass
class Pod:
    """A complete generator, except that it takes part in no real sync round."""

    service: Service
    loop: GeneratorLoop
    engine: ScriptedEngine
    running: asyncio.Task[None]

    @property
    def tokens(self) -> int:
        """Return the number of tokens sampled so far for running completions."""
        return sum(len(done.tokens) for done in self.engine.snapshot().values())


@asynccontextmanager
async def pod(folder: Path, server: RedisServer, name: str = "generator-0") -> AsyncIterator[Pod]:
    """Yield a generator that holds the run's published version."""
    config = small_config(folder, server, *SLOW)
    async with open_service("generator", config, name) as service:
        await service.store.run.create("config", "data", 4, 16)
        state = await service.store.run.state()
        assert state is not None
        fence = state.trainer_fence or await service.store.run.attach_trainer()
        await service.store.steps.publish(fence, 0)
        service.say(phase="ready", version=0, world=1, trainer_fence=fence)
        engine = ScriptedEngine()
        await engine.start(config)
        engine.version = 0
        metrics = GeneratorMetrics(service.registry)
        loop = GeneratorLoop(service, engine, PlainTokenizer(), AnyVerifier(), metrics)  # type: ignore[arg-type]
        weights = WeightFollower(service, engine, metrics, loop.evaluation)
        service.ready = loop.why_idle
        for title, body in (
            ("leases", loop.tickets.renew), ("weights", weights.follow),
            ("pause", lambda task: loop.follow_pause(task, lambda: weights.frozen)),
        ):  # fmt: skip
            service.add_loop(title, body)
        running = asyncio.create_task(service.run(loop.work))
        try:
            yield Pod(service, loop, engine, running)
        finally:
            service.stop()
            await running
            if name == "generator-0":
                await service.store.restores.delete_run()


async def issue(store: Store, count: int) -> int:
    fence = await store.run.lead("test", 60)
    assert fence is not None
    assert await store.tickets.issue(fence, 0, [ticket(i) for i in range(count)]) == count
    return fence


async def headers(store: Store) -> int:
    return (await store.run.audit())["headers"]


async def ask(one: Pod, path: str, **body: str) -> dict[str, object]:
    async with httpx.AsyncClient(base_url=one.service.status.url, headers=TOKEN, timeout=60) as http:
        answer = await http.post(path, params={"wait_s": 30}, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


async def test_a_pause_freezes_requests_where_they_are(tmp_path: Path, server: RedisServer) -> None:
    async with pod(tmp_path, server) as one:
        store = one.service.store
        fence = await issue(store, 4)
        await wait_until(lambda: one.tokens > 0)
        answer = await ask(one, "/v1/pause", who="tester", why="lunch")
        assert answer["waiting_for"] == []
        assert (answer["paused"], answer["why"]) == (True, "tester: lunch")
        made, held = one.tokens, set(one.loop.tickets.held)
        await asyncio.sleep(0.5)
        assert (one.tokens, set(one.loop.tickets.held)) == (made, held), "tokens were sampled during a pause"
        assert one.loop.why_idle() == "paused: tester: lunch"
        assert (await ask(one, "/v1/resume"))["waiting_for"] == []
        await wait_until(lambda: _all(store, 4), 60)
        for item in await store.replay.read_headers(fence, 10):
            assert item.header is not None
            given = ticket(int(item.ticket.split("-")[1]))
            expected = [len(scripted_tokens(given.prompt, given.seed + i, 24, 4, 100)) for i in range(4)]
            assert item.header.lengths == expected


async def _all(store: Store, count: int) -> bool:
    return await headers(store) == count


async def test_a_pod_that_receives_weights_can_be_paused(tmp_path: Path, server: RedisServer) -> None:
    """A transfer may take minutes. The pod applies the received weights during the pause and stays frozen with them."""
    async with pod(tmp_path, server) as one:
        store, arrived = one.service.store, asyncio.Event()

        async def stage(version: int) -> None:
            one.engine.staged = {}
            await arrived.wait()

        one.engine.stage = stage  # type: ignore[method-assign]
        await issue(store, 4)
        await wait_until(lambda: one.tokens > 0)
        state = await store.run.state()
        assert state is not None
        await store.fleet.set_round(
            state.trainer_fence, Round(1, 1, "transfer", {one.service.status.member: 1}, 2, "gloo", "", 0, 1, state.trainer_fence)
        )
        assert (await ask(one, "/v1/pause", who="tester", why="lunch"))["waiting_for"] == []
        made = one.tokens
        arrived.set()
        await wait_until(lambda: one.engine.version == 1)
        await asyncio.sleep(0.3)
        assert one.tokens == made, "the round ended the pause"
        assert (await ask(one, "/v1/resume"))["waiting_for"] == []
        await wait_until(lambda: one.tokens != made)


async def test_a_pod_started_during_a_pause_stays_paused(tmp_path: Path, server: RedisServer) -> None:
    async with pod(tmp_path, server) as first:
        store = first.service.store
        await ask(first, "/v1/pause")
        await issue(store, 4)
        async with pod(tmp_path, server, "generator-1") as late:
            await wait_until(lambda: late.service.status.paused)
            assert not late.engine.go.is_set()
            async with httpx.AsyncClient(base_url=late.service.status.url) as http:
                ready = await http.get("/health/ready")
            assert (ready.status_code, ready.json()["why_not"]) == (503, "paused: REST")
            assert (await store.run.audit())["tickets"] == 4
            assert (await ask(late, "/v1/resume"))["waiting_for"] == []
            await wait_until(lambda: _all(store, 4), 60)


async def test_a_timed_out_wait_names_pods_that_did_not_follow(store: Store, server: RedisServer, tmp_path: Path) -> None:
    """The reply names a stuck pod, which delays the caller no longer than requested."""
    await flow.start(store)
    config = small_config(tmp_path, server, f"run.name={store.keys.name}")
    async with open_service("generator", config, "generator-7") as service:
        service.say(phase="ready")
        await store.fleet.beat(service.status, 30.0)
        async with httpx.AsyncClient(base_url=service.status.url, headers=TOKEN) as http:
            answer = (await http.post("/v1/pause", params={"wait_s": 0.3})).json()
        assert answer["waiting_for"] == ["generator-7"]
        await store.fleet.leave(service.status)
