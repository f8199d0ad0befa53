"""The generator's loop on a real Redis with the scripted engine: every claimed ticket ends up in exactly one place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from services.console.run.redis_server import RedisServer
from services.generator.loop import GeneratorLoop
from services.generator.metrics import GeneratorMetrics
from services.groups.generated import Generated
from services.http.entry import open_service
from services.protocol import codec
from services.protocol.errors import RedisFull, RedisUnreachable, StoreError
from services.protocol.messages import Header
from services.runtime.holding import MAX_ATTEMPTS
from services.runtime.loops import Broken
from services.runtime.service import Service
from services.store import Store
from services.verifiers.base import Job, Scores, VerifierFailure
from services.weights.receiver import EngineDead
from tests.support import flow
from tests.support.harness import PlainTokenizer, buried, small_config, ticket, wait_until
from tests.support.scripted import ScriptedEngine, scripted_logprobs, scripted_tokens

STEPS, SLOTS = 4, 16


class CountingVerifier:
    """Scores by the ticket's answer: `break` fails, anything else gives the first completion a score of 1."""

    waiting = ""

    async def score(self, job: Job) -> Scores:
        if job.answer == "break":
            raise VerifierFailure("exact broke")
        return Scores({"exact": [1.0] + [0.0] * (len(job.completions) - 1)}, [])


@asynccontextmanager
async def generator(
    folder: Path, server: RedisServer, *overrides: str
) -> AsyncIterator[tuple[Service, GeneratorLoop, ScriptedEngine]]:
    """Yield a pod whose engine holds version 0, which the run has published. Its leases last, even on a slow machine."""
    config = small_config(folder, server, "fleet.ttl_s=40", *overrides)
    async with open_service("generator", config, "generator-0") as service:
        await service.store.run.create("config", "data", STEPS, SLOTS)
        fence = await service.store.run.attach_trainer()
        await service.store.steps.publish(fence, 0)
        service.say(phase="ready", version=0, world=1, trainer_fence=fence)
        engine = ScriptedEngine()
        await engine.start(config)
        engine.version = 0
        parts = service, engine, PlainTokenizer(), CountingVerifier(), GeneratorMetrics(service.registry)
        loop = GeneratorLoop(*parts)  # type: ignore[arg-type]
        service.add_loop("leases", loop.tickets.renew)
        service.add_loop("partials", loop.save_partials)
        try:
            yield service, loop, engine
        finally:
            await service.store.restores.delete_run()


async def issue(store: Store, *tickets: object) -> int:
    fence = await store.run.lead("test", 60)
    assert fence is not None
    state = await store.run.state()
    assert state is not None
    assert await store.tickets.issue(fence, state.cursor, tickets) == len(tickets)  # type: ignore[arg-type]
    return fence


async def test_tickets_become_headers_with_their_payload(tmp_path: Path, server: RedisServer) -> None:
    async with generator(tmp_path, server) as (service, loop, _):
        given = [ticket(i) for i in range(10)]
        fence = await issue(service.store, *given)
        running = asyncio.create_task(service.run(loop.work))

        async def all_there() -> bool:
            return (await service.store.run.audit())["headers"] == 10

        await wait_until(all_there)
        service.stop()
        await running
        items = await service.store.replay.read_headers(fence, 100)
        headers = {item.ticket: item.header for item in items}
        payloads = await service.store.steps.payloads([item.payload for item in items])
        for one in given:
            header = headers[one.id]
            assert isinstance(header, Header)
            assert header.rewards == [1.0, 0.0, 0.0, 0.0]
            assert header.oldest == [0, 0, 0, 0]
            payload = payloads[header.payload]
            tokens = np.concatenate([scripted_tokens(one.prompt, one.seed + i, 16, 4, 100) for i in range(4)])
            assert payload.tokens.tolist() == tokens.tolist()
            assert payload.logprobs.tolist() == scripted_logprobs(tokens).tolist()
        assert (await service.store.run.audit())["tickets"] == 0


async def test_nothing_is_claimed_while_paused_or_outdated(tmp_path: Path, server: RedisServer) -> None:
    async with generator(tmp_path, server) as (service, loop, engine):
        await service.store.run.pause("generator", "a test")
        await issue(service.store, ticket(0))
        running = asyncio.create_task(service.run(loop.work))
        await wait_until(lambda: service.view.paused)
        assert loop.why_idle() == "paused: a test"
        engine.version = 5
        await service.store.run.resume("generator")
        await wait_until(lambda: "has policy version 5" in loop.why_idle())
        engine.version = -1
        assert loop.why_idle().startswith("unsynced: no weights yet")
        service.say(phase="loading")
        assert loop.why_idle().startswith("loading: ")
        service.say(phase="ready")
        engine.version = 5
        assert (await service.store.run.audit())["headers"] == 0
        engine.version = 0
        service.notifications.notify("version")
        await wait_until(lambda: _headers(service.store, 1))
        service.stop()
        await running


async def test_nothing_is_claimed_after_a_partial_update(tmp_path: Path, server: RedisServer) -> None:
    async with generator(tmp_path, server) as (service, loop, engine):
        await issue(service.store, ticket(0))
        await service.view.refresh()
        assert loop.why_idle() == ""
        engine.whole = False
        assert loop.why_idle() == "unsynced: an update was applied only in part; waiting for a complete one"
        assert await loop.claim() == 0
        engine.whole = True
        assert await loop.claim() == 1
        await wait_until(lambda: _headers(service.store, 1))


async def _headers(store: Store, count: int) -> bool:
    return (await store.run.audit())["headers"] == count


async def test_a_pod_adopts_its_own_tickets_after_its_first_claim_was_refused(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with generator(tmp_path, server) as (service, loop, _):
        await issue(service.store, ticket(0))
        assert len(await flow.claim(service.store, "generator-0", lease_s=600)) == 1, "by the pod's earlier process"
        flow.refuse_first_claim(monkeypatch)
        running = asyncio.create_task(service.run(loop.work))
        await wait_until(lambda: _headers(service.store, 1))
        service.stop()
        await running


async def test_the_next_pod_continues_what_a_drain_cannot_finish(tmp_path: Path, server: RedisServer) -> None:
    slow = ("generator.engine_options.token_s=0.3", "generator.drain_s=0.1")
    async with generator(tmp_path, server, *slow) as (service, loop, engine):
        fence = await issue(service.store, *(ticket(i) for i in range(4)))
        running = asyncio.create_task(service.run(loop.work))

        def all_begun() -> bool:
            begun = [sum(len(one.tokens) for one in loop.worker.so_far(held)) for held in loop.tickets.held.values()]
            return len(begun) == 4 and min(begun) > 0 and engine.gauges().tokens > 20

        await wait_until(all_begun)
        service.stop()
        await running
        begun = (await service.store.run.audit())["tickets"]
        assert begun > 0
        saved = sum([await service.store.tickets.load_partial(f"0-{i}") is not None for i in range(4)])
        assert saved == begun

        second = GeneratorLoop(service, engine, PlainTokenizer(), CountingVerifier(), loop.metrics)  # type: ignore[arg-type]
        service.stopping.clear()
        engine._token_s = 0.0
        made = engine.gauges().tokens
        running = asyncio.create_task(service.run(second.work))
        await wait_until(lambda: _headers(service.store, 4))
        service.stop()
        await running
        total = 0
        for item in await service.store.replay.read_headers(fence, 10):
            payload = (await service.store.steps.payloads([item.payload]))[item.payload]
            one = ticket(int(item.ticket[2:]))
            whole = np.concatenate([scripted_tokens(one.prompt, one.seed + i, 16, 4, 100) for i in range(4)])
            assert payload.tokens.tolist() == whole.tolist()
            total += len(whole)
        assert engine.gauges().tokens == total, "tokens were sampled twice"
        assert made > 20


async def test_a_drain_hands_everything_back_although_redis_is_full(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: object) -> None:
        raise RedisFull("Redis is full")

    monkeypatch.setattr("services.store.tickets.Tickets.save_partial", full)
    slow = ("generator.engine_options.token_s=0.3", "generator.drain_s=0.1")
    async with generator(tmp_path, server, *slow) as (service, loop, engine):
        await issue(service.store, *(ticket(i) for i in range(3)))
        running = asyncio.create_task(service.run(loop.work))
        await wait_until(lambda: len(loop.tickets.held) == 3 and engine.gauges().tokens > 12)
        service.stop()
        await running
        assert not loop.tickets.held, "they are still sampled"
        assert service.registry.get_sample_value("grpo_generator_handed_back_total", {"reason": "drain"}) == 3
        assert len(await flow.claim(service.store, "generator-1", 10)) == 3


async def test_a_broken_verifier_is_retried_and_then_dead_lettered(tmp_path: Path, server: RedisServer) -> None:
    async with generator(tmp_path, server) as (service, loop, _):
        await issue(service.store, ticket(0, answer="break"), ticket(1))
        running = asyncio.create_task(service.run(loop.work))

        async def failed() -> bool:
            return (await service.store.run.audit()).get("ledger:failed", 0) == 1

        await wait_until(failed)
        await wait_until(lambda: _headers(service.store, 1))
        service.stop()
        await running
        assert await buried(service.store) == [("0-0", "exact broke")]
        assert service.registry.get_sample_value("grpo_generator_failures_total", {"reason": "verifier"}) == MAX_ATTEMPTS


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (ticket(0, prompt=[1] * 60), "exceed model.max_tokens"),
        (ticket(0, prompt=[999]), "outside 0..127"),
        (ticket(0, prompt=[]), "empty"),
    ],
)
async def test_an_impossible_ticket_is_dead_lettered_at_once(
    tmp_path: Path, server: RedisServer, broken: object, reason: str
) -> None:
    async with generator(tmp_path, server) as (service, loop, _):
        fence = await issue(service.store, ticket(0) if broken is None else broken, ticket(1))
        running = asyncio.create_task(service.run(loop.work))
        await wait_until(lambda: _headers(service.store, 1))
        service.stop()
        await running
        ((_, why),) = await buried(service.store)
        assert reason in why
        (item,) = await service.store.replay.read_headers(fence, 10)
        assert item.header is not None
        assert codec.encode(item.header) == item.body


async def test_tickets_that_are_claimed_with_an_impossible_one_are_worked_on_without_redis(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with generator(tmp_path, server) as (service, loop, _):
        await issue(service.store, ticket(0, prompt=[]), ticket(1))

        async def unavailable(*_: object) -> None:
            raise RedisUnreachable("Redis does not answer")

        monkeypatch.setattr(service.store.tickets, "fail", unavailable)
        running = asyncio.create_task(service.run(loop.work))
        await wait_until(lambda: _headers(service.store, 1))
        service.stop()
        await running
        claimed = service.registry.get_sample_value("grpo_generator_claimed_tickets_total")
        assert claimed == 2, "no lease had to expire"


async def test_an_engine_that_dies_of_a_ticket_ends_the_process(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dead(*given: object) -> Generated:
        raise EngineDead("the core died")

    async with generator(tmp_path, server) as (service, loop, engine):
        await issue(service.store, ticket(0))
        monkeypatch.setattr(engine, "generate", dead)
        with pytest.raises(Broken, match="the core died"):
            await asyncio.wait_for(service.run(loop.work), 20)
        audit = await service.store.run.audit()
        assert (audit["tickets"], audit.get("ledger:failed", 0)) == (1, 0), "another pod takes over when the lease expires"


async def test_a_zombie_cannot_submit_a_ticket_taken_over(tmp_path: Path, server: RedisServer) -> None:
    async with generator(tmp_path, server) as (service, loop, engine):
        await issue(service.store, ticket(0))
        await engine.pause()  # so that its group is still running when the other pod takes over the ticket
        service.loops.clear()
        running = asyncio.create_task(service.run(loop.work))
        await wait_until(lambda: loop.tickets.held)

        async def took_over() -> bool:
            _, claims = await service.store.tickets.claim("thief", 0, await flow.trainer_fence(service.store), 0.0, 1)
            return bool(claims)

        await wait_until(took_over)
        await engine.resume()
        await wait_until(lambda: not loop.tickets.held)
        service.stop()
        await running
        audit = await service.store.run.audit()
        assert (audit["headers"], audit["tickets"], audit["ledger:refused_submits"]) == (0, 1, 1)


async def test_a_full_redis_costs_no_attempt_and_no_completion(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.runtime.holding.SUBMIT_AGAIN_S", 0.01)
    monkeypatch.setattr("services.runtime.holding.MAX_ATTEMPTS", 1)
    async with generator(tmp_path, server) as (service, loop, engine):
        submit, refusals = service.store.tickets.submit, 3

        async def full(*args: object) -> bool:
            nonlocal refusals
            refusals -= 1
            if refusals >= 0:
                raise StoreError("Redis is full")
            return await submit(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(service.store.tickets, "submit", full)
        await issue(service.store, ticket(0))
        running = asyncio.create_task(service.run(loop.work))
        await wait_until(lambda: _headers(service.store, 1))
        made = engine.gauges().tokens
        service.stop()
        await running
        assert made == sum(len(scripted_tokens(ticket(0).prompt, ticket(0).seed + i, 16, 4, 100)) for i in range(4))
        assert (await service.store.run.audit()).get("ledger:failed", 0) == 0
