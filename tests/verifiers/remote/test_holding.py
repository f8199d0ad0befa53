"""A generator whose reward service is down holds its tickets: nothing is lost, fails or scores zero."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.console.run.redis_server import RedisServer
from services.generator.loop import GeneratorLoop
from services.generator.metrics import GeneratorMetrics
from services.http.entry import open_service
from services.runtime.service import Service
from services.verifiers.base import Job
from services.verifiers.scoring import Scoring
from tests.support.harness import PlainTokenizer, buried, small_config, ticket, wait_until
from tests.support.scripted import ScriptedEngine
from tests.verifiers.remote.asking import ROW
from tests.verifiers.remote.flaky_server import FlakyServer

GROUPS = 6


class Held:
    """A pod that works on tickets, with access to its state."""

    def __init__(self, service: Service, engine: ScriptedEngine, scoring: Scoring) -> None:
        self.service, self.engine, self.scoring = service, engine, scoring
        self.metrics = GeneratorMetrics(service.registry)
        self.loop = GeneratorLoop(service, engine, PlainTokenizer(), scoring, self.metrics)
        self.fence = 0

    async def audit(self) -> dict[str, int]:
        return await self.service.store.run.audit()

    async def scored(self, count: int) -> bool:
        return (await self.audit())["headers"] == count

    async def rewards(self) -> list[float]:
        items = await self.service.store.replay.read_headers(self.fence, 100)
        return [reward for item in items if item.header for reward in item.header.rewards]


@asynccontextmanager
async def pod(folder: Path, server: RedisServer, rewards: FlakyServer, *overrides: str) -> AsyncIterator[Held]:
    """Yield a pod whose engine holds version 0 of a run, with tickets to work on."""
    verifiers = f'verifiers=[{{kind="http", url="{rewards.url}/score"}}]'
    config = small_config(folder, server, verifiers, "generator.max_num_seqs=8", *overrides)
    async with open_service("generator", config, "generator-0") as service:
        store = service.store
        await store.run.create("config", "data", 4, 16)
        trainer = await store.run.attach_trainer()
        await store.steps.publish(trainer, 0)
        service.say(phase="ready", version=0, world=1, trainer_fence=trainer)
        engine, scoring = ScriptedEngine(), Scoring(config, config.data.sources)
        await engine.start(config)
        await scoring.start()
        engine.version = 0
        held = Held(service, engine, scoring)
        service.add_loop("leases", held.loop.tickets.renew)
        service.add_loop("gauges", held.loop.show_gauges)
        held.fence = await store.run.lead("test", 60) or 0
        state = await store.run.state()
        row = msgspec.json.encode(ROW).decode()
        assert state is not None
        assert await store.tickets.issue(held.fence, state.cursor, [ticket(i, row=row) for i in range(GROUPS)]) == GROUPS
        try:
            yield held
        finally:
            await scoring.close()
            await store.restores.delete_run()


def counted(metrics: GeneratorMetrics) -> dict[str, float]:
    """Return the counters that must not change while tickets are held."""
    return {reason: counter._value.get() for reason, counter in metrics.failures.items()} | {
        "lost": metrics.lost._value.get(), "given_up": metrics.given_up._value.get(),
    }  # fmt: skip


async def test_tickets_are_held_while_the_service_is_down(tmp_path: Path, server: RedisServer, service: FlakyServer) -> None:
    service.kill()
    async with pod(tmp_path, server, service) as held:
        running = asyncio.create_task(held.service.run(held.loop.work))
        await wait_until(lambda: held.scoring.waiting)
        assert held.loop.why_idle().startswith(f"waiting for verifier 'http' at {service.url}/score: connection refused")
        await wait_until(lambda: _shows(held))
        before = await held.audit()
        leases = 2 * held.service.config.fleet.lease_s
        await asyncio.sleep(leases)  # nothing may happen meanwhile
        assert await held.audit() == before
        assert before["headers"] == 0
        assert set(counted(held.metrics).values()) == {0.0}
        made = held.engine.gauges().tokens

        await asyncio.to_thread(service.start)
        await wait_until(lambda: held.scored(GROUPS))
        assert held.loop.why_idle() == ""
        await wait_until(lambda: _shows(held, ""))
        held.service.stop()
        await running
        assert min(await held.rewards()) > 0
        assert len(await held.rewards()) == GROUPS * 4
        assert made <= held.engine.gauges().tokens
        assert set(counted(held.metrics).values()) == {0.0}
        assert await buried(held.service.store) == []


async def _shows(held: Held, start: str = "waiting for verifier") -> bool:
    """Return whether the fleet status shows what the pod waits for."""
    (member,) = await held.service.store.fleet.members(60)
    return member.waiting.startswith(start) and bool(member.waiting) == bool(start)


async def test_a_drain_hands_back_held_tickets_with_their_tokens(
    tmp_path: Path, server: RedisServer, service: FlakyServer
) -> None:
    service.kill()
    async with pod(tmp_path, server, service, "generator.drain_s=0.1") as held:
        running = asyncio.create_task(held.service.run(held.loop.work))
        await wait_until(lambda: held.scoring.waiting and held.loop.generating == 0)
        made, count = held.engine.gauges().tokens, len(held.loop.tickets.held)
        assert count > 0
        held.service.stop()
        await running
        saved = [await held.service.store.tickets.load_partial(f"0-{i}") for i in range(GROUPS)]
        assert sum(partial is not None for partial in saved) == count
        assert held.scoring.waiting == ""

        await asyncio.to_thread(service.start)
        second = GeneratorLoop(held.service, held.engine, PlainTokenizer(), held.scoring, held.metrics)
        held.service.stopping.clear()
        running = asyncio.create_task(held.service.run(second.work))
        await wait_until(lambda: held.scored(GROUPS))
        held.service.stop()
        await running
        assert min(await held.rewards()) > 0
        sampled = sum(len(held.engine.script(t.prompt, t.seed + i, 16)) for t in map(ticket, range(GROUPS)) for i in range(4))
        assert made > 0
        assert held.engine.gauges().tokens == sampled, "no token was sampled twice"


async def test_a_pause_works_while_the_service_is_down(tmp_path: Path, server: RedisServer, service: FlakyServer) -> None:
    service.kill()
    async with pod(tmp_path, server, service) as held:
        held.service.add_loop("pause", lambda task: held.loop.follow_pause(task, lambda: True))
        running = asyncio.create_task(held.service.run(held.loop.work))
        await wait_until(lambda: held.scoring.waiting and held.loop.generating == 0)
        await held.service.store.run.pause("generator", "a test")
        await wait_until(lambda: held.service.status.paused)
        count = len(held.loop.tickets.held)
        assert count
        await asyncio.to_thread(service.start)
        await wait_until(lambda: not held.loop.tickets.held)
        assert await held.scored(count), "what is generated is scored and submitted during a pause"
        await held.service.store.run.resume("generator")
        await wait_until(lambda: held.scored(GROUPS))
        held.service.stop()
        await running
        assert min(await held.rewards()) > 0
        assert set(counted(held.metrics).values()) == {0.0}


async def test_a_service_that_stays_down_fails_tickets_with_the_reason(
    tmp_path: Path, server: RedisServer, service: FlakyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.kill()
    monkeypatch.setattr("services.verifiers.scoring.GIVE_UP_S", 0.5)
    given_up = f'verifiers=[{{kind="http", url="{service.url}/score"}}]'
    async with pod(tmp_path, server, service, given_up) as held:
        running = asyncio.create_task(held.service.run(held.loop.work))
        await wait_until(lambda: _buried(held, GROUPS))
        held.service.stop()
        await running
        for _, reason in await buried(held.service.store):
            assert "connection refused; no answer for 0.5 s" in reason
        assert (await held.audit())["headers"] == 0


async def _buried(held: Held, count: int) -> bool:
    return len(await buried(held.service.store)) == count


async def test_an_invalid_score_is_retried_without_resampling(tmp_path: Path, server: RedisServer, service: FlakyServer) -> None:
    service.behave("raw:{}", "status:400")
    async with pod(tmp_path, server, service) as held:
        running = asyncio.create_task(held.service.run(held.loop.work))
        await wait_until(lambda: held.scored(GROUPS))
        held.service.stop()
        await running
        sampled: Any = sum(
            len(held.engine.script(t.prompt, t.seed + i, 16)) for t in map(ticket, range(GROUPS)) for i in range(4)
        )
        assert held.engine.gauges().tokens == sampled
        assert counted(held.metrics)["verifier"] == 2.0
        assert min(await held.rewards()) > 0


async def test_workers_of_other_verifiers_do_not_inherit_the_token(
    tmp_path: Path, service: FlakyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARMLESS", "s3cr3t-token")
    verifiers = f'verifiers=[{{kind="exact"}}, {{kind="http", url="{service.url}/score", token="env:HARMLESS"}}]'
    config = small_config(tmp_path, None, verifiers)
    scoring = Scoring(config, config.data.sources, workers=1)
    await scoring.start()
    try:
        found = await scoring.score(Job("main", ["4", "five"], "4", msgspec.json.encode(ROW).decode(), ["stop", "stop"]))
        (worker,) = scoring.pools[0].pids
        assert b"s3cr3t-token" not in await asyncio.to_thread(Path(f"/proc/{worker}/environ").read_bytes)
    finally:
        await scoring.close()
    assert found.scores == {"exact": [1.0, 0.0], "http": [0.5, 0.2]}
    assert service.requests[0]["authorization"] == "Bearer s3cr3t-token"
