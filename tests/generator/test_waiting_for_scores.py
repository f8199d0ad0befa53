"""Groups that wait for scores free their seats, and their tokens are never sampled again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.console.run.redis_server import RedisServer
from services.generator.loop import GeneratorLoop
from services.protocol.errors import RedisFull, StoreError
from services.store import Store
from services.verifiers.base import Job, Scores, VerifierFailure
from tests.generator.test_loop import generator, issue
from tests.support.harness import buried, ticket, wait_until
from tests.support.scripted import scripted_tokens


class SlowVerifier:
    """Blocks until it may score, then fails a given number of times."""

    waiting = ""

    def __init__(self, failures: int = 0, final: bool = False) -> None:
        self.may = asyncio.Event()
        self.failures, self.final = failures, final
        self.asked = 0

    async def score(self, job: Job) -> Scores:
        self.asked += 1
        await self.may.wait()
        if self.failures:
            self.failures -= 1
            raise VerifierFailure("the judge is drunk", final=self.final)
        return Scores({"exact": [1.0] * len(job.completions)}, ["{}"] * len(job.completions))


def slow(loop: GeneratorLoop, failures: int = 0, final: bool = False) -> SlowVerifier:
    made = SlowVerifier(failures, final)
    loop.verifiers = loop.worker.verifiers = made  # type: ignore[assignment]
    return made


def length(*indices: int) -> int:
    """Return the number of tokens in all completions of these tickets."""
    groups = [ticket(i) for i in indices]
    return sum(len(scripted_tokens(one.prompt, one.seed + i, 16, 4, 100)) for one in groups for i in range(4))


async def headers(store: Store) -> int:
    return (await store.run.audit())["headers"]


async def test_a_group_frees_its_seats_while_it_is_scored(tmp_path: Path, server: RedisServer) -> None:
    async with generator(tmp_path, server, "generator.max_num_seqs=4") as (service, loop, _):
        verifier = slow(loop)
        await issue(service.store, *(ticket(i) for i in range(12)))
        running = asyncio.create_task(service.run(loop.work))
        most = service.registry.get_sample_value("grpo_generator_scoring_limit")
        assert most == 8
        await wait_until(lambda: verifier.asked == 8 and loop.generating == 0, 30)
        await asyncio.sleep(0.7)  # longer than the poll for freed tickets
        assert (verifier.asked, loop.generating) == (8, 0), "at most as many wait as the bound allows"
        assert service.registry.get_sample_value("grpo_generator_scoring") == 8
        assert (await service.store.run.audit())["tickets"] == 12
        verifier.may.set()

        async def all_there() -> bool:
            return await headers(service.store) == 12

        await wait_until(all_there)
        service.stop()
        await running


async def test_a_service_failing_for_some_groups_does_not_delay_others(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.generator.loop.PROBE_S", 0.1)
    async with generator(tmp_path, server) as (service, loop, _):
        verifier = slow(loop)
        verifier.waiting = "waiting for verifier 'judge': answered 500, for 7 s"
        await issue(service.store, *(ticket(i) for i in range(3)))
        running = asyncio.create_task(service.run(loop.work))
        await wait_until(lambda: verifier.asked == 3)
        assert loop.why_idle() == verifier.waiting
        verifier.may.set()

        async def all_there() -> bool:
            return await headers(service.store) == 3

        await wait_until(all_there)
        service.stop()
        await running


async def test_a_group_whose_scoring_failed_is_rescored(tmp_path: Path, server: RedisServer) -> None:
    async with generator(tmp_path, server) as (service, loop, engine):
        verifier = slow(loop, failures=2)
        verifier.may.set()
        await issue(service.store, ticket(0), ticket(1))
        running = asyncio.create_task(service.run(loop.work))

        async def all_there() -> bool:
            return await headers(service.store) == 2

        await wait_until(all_there)
        service.stop()
        await running
        assert verifier.asked == 4
        assert engine.gauges().tokens == length(0, 1), "tokens were sampled twice"


async def test_a_failure_is_reported_although_redis_is_full(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: object) -> None:
        raise RedisFull("Redis is full")

    monkeypatch.setattr("services.store.tickets.Tickets.save_partial", full)
    async with generator(tmp_path, server) as (service, loop, _):
        verifier = slow(loop, failures=1, final=True)
        verifier.may.set()
        await issue(service.store, ticket(0))
        running = asyncio.create_task(service.run(loop.work))
        await wait_until(lambda: verifier.asked == 1 and not loop.tickets.held)
        service.stop()
        await running
        assert await buried(service.store) == [("0-0", "the judge is drunk")]


async def test_tokens_that_could_not_be_saved_are_saved_later(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.generator.loop.PARTIAL_EVERY_S", 0.1)
    async with generator(tmp_path, server) as (service, loop, _):
        verifier = slow(loop)
        save, failures = service.store.tickets.save_partial, [StoreError("Redis is restarting")]

        async def flaky(*given: Any) -> bool:
            if failures:
                raise failures.pop()
            return await save(*given)

        monkeypatch.setattr(service.store.tickets, "save_partial", flaky)
        await issue(service.store, ticket(0))
        running = asyncio.create_task(service.run(loop.work))

        async def saved() -> bool:
            return await service.store.tickets.load_partial("0-0") is not None

        await wait_until(saved)
        assert verifier.asked == 1
        verifier.may.set()

        async def there() -> bool:
            return await headers(service.store) == 1

        await wait_until(there)
        service.stop()
        await running


async def test_a_final_failure_is_dead_lettered_at_once(tmp_path: Path, server: RedisServer) -> None:
    async with generator(tmp_path, server) as (service, loop, _):
        verifier = slow(loop, failures=1, final=True)
        verifier.may.set()
        await issue(service.store, ticket(0))
        running = asyncio.create_task(service.run(loop.work))

        async def failed() -> bool:
            return bool(await buried(service.store))

        await wait_until(failed)
        service.stop()
        await running
        assert await buried(service.store) == [("0-0", "the judge is drunk")]
        assert verifier.asked == 1


async def test_a_drain_hands_over_finished_groups_with_their_tokens(tmp_path: Path, server: RedisServer) -> None:
    async with generator(tmp_path, server, "generator.drain_s=0.1") as (service, loop, engine):
        verifier = slow(loop)
        await issue(service.store, ticket(0), ticket(1))
        running = asyncio.create_task(service.run(loop.work))
        await wait_until(lambda: verifier.asked == 2)
        service.stop()
        await running
        assert await headers(service.store) == 0
        assert service.registry.get_sample_value("grpo_generator_handed_back_tokens_total") == length(0, 1)
    made = engine.gauges().tokens
    assert made == length(0, 1)
