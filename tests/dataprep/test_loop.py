"""Dataprep on a real Redis, with fake generators and a fake trainer that respond at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from services.config import RunConfig
from services.console.run.redis_server import RedisServer
from services.dataprep.evaluation_rounds import EvaluationRounds
from services.dataprep.identity import table_rules
from services.dataprep.loop import IDLE_S, OUT_OF_STEP, DataprepLoop
from services.dataprep.metrics import DataprepMetrics, EvaluationMetrics
from services.dataprep.prompts.catalogue import PromptSource
from services.dataprep.prompts.issuing import ticket_seed
from services.dataprep.prompts.order import permutation
from services.dataprep.replay.settling import settle
from services.http.entry import open_service
from services.protocol import codec
from services.protocol.errors import Fenced
from services.protocol.messages import Header, StepPlan, Ticket
from services.protocol.payloads import Payload
from services.runtime.service import Service
from services.store import Claim, HeaderEntry, RunState, Store
from services.store.snapshot_format import Snapshot
from tests.support import flow
from tests.support.harness import buried, save_tokenizer_folder, small_config, ticket, wait_until

T = TypeVar("T")

LENGTH = 6  # number of tokens in every completion


@asynccontextmanager
async def dataprep(config: RunConfig, name: str = "dataprep-0") -> AsyncIterator[tuple[Service, DataprepLoop]]:
    """Yield a pod that has not started its loop."""
    source = PromptSource(config)
    async with open_service("dataprep", config, name) as service:
        await service.store.run.create("config", source.digest, config.run.steps, config.slots, table_rules(config))
        yield (
            service,
            DataprepLoop(
                service,
                source,
                DataprepMetrics(service.registry),
                EvaluationRounds(config, service.store, None, EvaluationMetrics(service.registry), service.tracing),
            ),
        )


def configured(folder: Path, server: RedisServer, *overrides: str) -> RunConfig:
    save_tokenizer_folder(folder / "model")
    return small_config(folder, server, *overrides)


def answer(ticket: Ticket, claim: Claim, version: int) -> tuple[Header, bytes]:
    """Return a generator's result for a ticket at `version`, with rewards that alternate between 1 and 0."""
    n = ticket.group_size
    tokens = np.zeros(n * LENGTH, np.int32)
    spans = np.array([(i, version, 0, LENGTH) for i in range(n)], np.int32)
    payload = codec.encode(
        Payload(np.asarray(ticket.prompt, np.int32), np.full(n, LENGTH, np.int32), tokens, tokens.astype(np.float32), spans)
    )
    header = Header(
        ticket.id, ticket.seq, ticket.epoch, ticket.index, claim.payload, len(payload), len(ticket.prompt), [LENGTH] * n,
        [float(i % 2) for i in range(n)], {"exact": [float(i % 2) for i in range(n)]}, [False] * n, [version] * n, [version] * n,
        "stand-in", 0.1, 0.0, ticket.source, [0] * n,
    )  # fmt: skip
    return header, payload


async def generate(store: Store, version: int, count: int = 100) -> list[Ticket]:
    """Claim all available tickets and submit their groups."""
    _, claims = await store.tickets.claim("stand-in", version, await flow.trainer_fence(store), 60, count)
    for claim in claims:
        await finish(store, claim, version)
    return [claim.ticket for claim in claims if claim.ticket]


async def finish(store: Store, claim: Claim, version: int) -> None:
    """Submit the group of a claimed ticket."""
    assert claim.ticket is not None
    header, payload = answer(claim.ticket, claim, version)
    assert await store.tickets.submit("stand-in", claim, header, payload, 3600)


async def claim_all(store: Store) -> tuple[int, list[Claim]]:
    """Publish the first weights as a trainer and claim the tickets issued then; return the trainer's fence and the claims."""
    fence = await store.run.attach_trainer()
    await store.steps.publish(fence, 0)
    await wait_until(lambda: _has(store, "tickets", 16))
    _, claims = await store.tickets.claim("stand-in", 0, await flow.trainer_fence(store), 60, 100)
    return fence, claims


async def train(store: Store, steps: int) -> list[StepPlan]:
    """Train all steps as a trainer would: commit, sync, publish."""
    fence, plans = await store.run.attach_trainer(), []
    await store.steps.publish(fence, 0)
    for step in range(steps):
        async with asyncio.timeout(60):
            while (plan := await store.steps.plan(step)) is None:
                await generate(store, step)
                await asyncio.sleep(0.01)
        plans.append(plan)
        await store.steps.commit(fence, step)
        await store.steps.publish(fence, step + 1)
    return plans


async def test_a_run_trains_every_prompt_once_in_the_seeded_order(tmp_path: Path, server: RedisServer) -> None:
    config = configured(tmp_path, server)
    async with dataprep(config) as (service, loop):
        running = asyncio.create_task(service.run(loop.work))
        plans = await train(service.store, config.run.steps)
        expected = [f"0-{row}" for row in permutation(config.run.seed, 0, 40)[: 4 * 8]]
        assert [group for plan in plans for group in plan.groups] == expected
        assert len(set(expected)) == 32
        audit = await service.store.run.audit()
        assert (audit["ledger:issued"], audit["ledger:trained"], audit["outstanding"], audit["buffered"]) == (32, 32, 0, 0)
        assert max(plan.stats["staleness/trained/max"] for plan in plans) <= config.admission.max_staleness
        assert plans[0].stats["reward/train/mean"] == 0.5
        service.stop()
        await running
        await service.store.restores.delete_run()


async def test_a_plan_carries_every_completion_with_its_advantage(tmp_path: Path, server: RedisServer) -> None:
    config = configured(tmp_path, server, "trainer.ranks=2")
    async with dataprep(config) as (service, loop):
        running = asyncio.create_task(service.run(loop.work))
        (plan,) = (await train(service.store, 1))[:1]
        ranks = [await service.store.steps.rank_plan(0, rank) for rank in range(2)]
        samples = [sample for rank in ranks for row in rank.rows for sample in row]
        assert len(samples) == 8 * 4
        assert {(sample.payload, sample.index) for sample in samples} == {
            (payload, i) for payload in {sample.payload for sample in samples} for i in range(4)
        }
        for sample in samples:
            assert abs(sample.advantage - (1.0 if sample.index % 2 else -1.0)) < 1e-6  # (r - 0.5) / 0.5
        assert plan.denominators == [8 * 4 * LENGTH]
        assert {len(rank.rows) for rank in ranks} == {plan.rows_per_rank}
        service.stop()
        await running
        await service.store.restores.delete_run()


async def test_a_corrupt_header_is_dead_lettered_and_frees_its_slot(tmp_path: Path, server: RedisServer) -> None:
    config = configured(tmp_path, server)
    async with dataprep(config) as (service, loop):
        store = service.store
        running = asyncio.create_task(service.run(loop.work))
        _, (claim, *rest) = await claim_all(store)
        assert claim.ticket is not None
        header, payload = answer(claim.ticket, claim, 0)
        lies = Header(**{**{f: getattr(header, f) for f in header.__struct_fields__}, "rewards": [float("nan")] * 4})
        assert await store.tickets.submit("stand-in", claim, lies, payload, 3600)
        entry = {"ticket": rest[0].ticket_id, "payload": "nowhere", "body": b"\xc1garbage"}
        await store.client.xadd(store.keys.headers, entry)
        await store.client.xadd(store.keys.headers, {"noise": b"\x00"})
        await wait_until(lambda: _has(store, "headers", 0))
        reasons = dict(await buried(store))
        assert "are not numbers of at most 1e+12" in reasons[claim.ticket_id]
        assert "corrupt header" in reasons[rest[0].ticket_id]
        assert (await store.run.audit())["ledger:failed"] == 2
        await wait_until(lambda: _has(store, "ledger:issued", 18))
        service.stop()
        await running
        await store.restores.delete_run()


async def _has(store: Store, name: str, count: int) -> bool:
    return (await store.run.audit()).get(name, 0) == count


async def test_a_standby_takes_over_and_the_old_leader_is_fenced_off(tmp_path: Path, server: RedisServer) -> None:
    config = configured(tmp_path, server, "fleet.ttl_s=3")
    async with dataprep(config) as (first, leader), dataprep(config, "dataprep-1") as (second, standby):
        leading = asyncio.create_task(first.run(leader.work))
        await wait_until(lambda: first.status.phase == "leading")
        standing_by = asyncio.create_task(second.run(standby.work))
        await wait_until(lambda: second.status.phase == "standby")
        old_fence = await first.store.run.lead(first.status.member, 3.0)
        leading.cancel()  # like kill -9: no step-down reaches Redis
        await asyncio.gather(leading, return_exceptions=True)
        await wait_until(lambda: second.status.phase == "leading")
        plans = await train(second.store, 4)
        assert len({group for plan in plans for group in plan.groups}) == 32
        assert old_fence is not None
        state = await second.store.run.state()
        assert state is not None
        with pytest.raises(Fenced):
            await first.store.tickets.issue(old_fence, state.cursor, [ticket(state.cursor)])
        second.stop()
        await standing_by
        await second.store.restores.delete_run()


class Slow:
    """A curriculum that takes longer than the lease of a leader, and notes how many calls run at once."""

    running = most = 0
    released = threading.Event()

    @classmethod
    def curriculum(cls, rows: np.ndarray, rates: np.ndarray, epoch: int) -> np.ndarray:
        cls.running += 1
        cls.most = max(cls.most, cls.running)
        cls.released.wait(30)
        cls.running -= 1
        return rows


slow = Slow.curriculum


@pytest.fixture
def curriculum() -> Iterator[type[Slow]]:
    """Return a curriculum that runs until it is released."""
    Slow.running, Slow.most = 0, 0
    Slow.released.clear()
    yield Slow
    Slow.released.set()


SLOW = ("fleet.ttl_s=1.5", f"data.curriculum={__name__}:slow")


async def test_a_leader_keeps_its_lease_during_a_slow_curriculum(
    tmp_path: Path, server: RedisServer, curriculum: type[Slow]
) -> None:
    async with dataprep(configured(tmp_path, server, *SLOW)) as (service, loop):
        running = asyncio.create_task(service.run(loop.work))
        await wait_until(lambda: curriculum.running)
        lead = service.store.run.lead
        for _ in range(60):
            assert await lead("standby", 1.5) is None
            await asyncio.sleep(0.05)
        assert service.loops[0].silent_s < 1.5
        curriculum.released.set()
        await wait_until(lambda: _has(service.store, "ledger:issued", 16))
        assert curriculum.most == 1
        service.stop()
        await running
        await service.store.restores.delete_run()


async def test_a_leader_that_loses_its_lease_or_stops_abandons_a_slow_curriculum(
    tmp_path: Path, server: RedisServer, curriculum: type[Slow]
) -> None:
    async with dataprep(configured(tmp_path, server, *SLOW)) as (service, loop):
        running = asyncio.create_task(service.run(loop.work))
        await wait_until(lambda: curriculum.running)
        await service.store.run.step_down(service.status.member)
        other = await service.store.run.lead("another", 0.5)
        with capture_logs() as logs:
            await wait_until(lambda: any(event["event"] == "leading" for event in logs))
        assert other is not None
        await asyncio.sleep(0.3)
        assert (curriculum.running, curriculum.most) == (1, 1), "the abandoned call is still running"
        service.stop()
        async with asyncio.timeout(5):
            await running
        assert curriculum.running == 1
        await service.store.restores.delete_run()


async def test_only_a_leader_that_was_superseded_warns_and_not_one_whose_run_is_restored(
    tmp_path: Path, server: RedisServer
) -> None:
    async with dataprep(configured(tmp_path, server)) as (service, loop):
        store, path = service.store, tmp_path / "snapshot"
        trainer = await store.run.attach_trainer()
        await store.snapshots.save(trainer, -1, path, payloads=True)
        running = asyncio.create_task(service.run(loop.work))
        await wait_until(lambda: service.status.phase == "leading")
        with capture_logs() as logs:
            await store.restores.restore(trainer, Snapshot(path), True, lambda: None)
            await wait_until(lambda: any(event["event"] == "leading" for event in logs))
        assert "the run is restored to a checkpoint, leading it again" in [event["event"] for event in logs]
        assert {event["log_level"] for event in logs} == {"info"}
        with capture_logs() as logs:
            await store.run.step_down(service.status.member)
            other = await store.run.lead("another", 0.5)
            await wait_until(lambda: any(event["event"] == "leading" for event in logs))
        assert other is not None
        assert [event["log_level"] for event in logs if "superseded" in event["event"]] == ["warning"]
        service.stop()
        await running
        await store.restores.delete_run()


async def test_a_pause_stops_issuing_until_resumed(tmp_path: Path, server: RedisServer) -> None:
    config = configured(tmp_path, server)
    async with dataprep(config) as (service, loop):
        await service.store.run.pause("dataprep", "a test")
        await service.view.refresh()
        running = asyncio.create_task(service.run(loop.work))
        await wait_until(lambda: service.status.phase == "leading")
        await asyncio.sleep(0.3)  # nothing happens, so there is no condition to wait for
        assert (await service.store.run.audit()).get("ledger:issued", 0) == 0
        assert loop.why_unready() == "", "it serves the API that resumes the run"
        await service.store.run.resume("dataprep")
        await wait_until(lambda: _has(service.store, "ledger:issued", 16))
        service.stop()
        await running
        await service.store.restores.delete_run()


def test_seeds_depend_on_run_epoch_and_row() -> None:
    seeds = {ticket_seed(run, epoch, row) for run in range(3) for epoch in range(3) for row in range(100)}
    assert len(seeds) == 900
    assert max(seeds) < 2**48


def test_a_header_that_cannot_be_packed_is_dead_lettered(tmp_path: Path, server: RedisServer) -> None:
    config = configured(tmp_path, server)
    ticket = Ticket("0-1", 0, 0, 1, 5, [1, 2], "4", config.sampling.group_size, "main")
    header, _ = answer(ticket, Claim("1-0", 7, "0-1", b"", ticket), 0)
    assert settle(HeaderEntry("1-0", "0-1", header.payload, b"", header), 0, config).action == "insert"
    long = msgspec.structs.replace(header, prompt_tokens=config.trainer.row_tokens)
    assert "longer than trainer.row_tokens" in settle(HeaderEntry("1-0", "0-1", header.payload, b"", long), 0, config).action


async def test_a_table_without_a_base_is_rescaled_at_any_step(tmp_path: Path, server: RedisServer) -> None:
    config = configured(tmp_path, server, "replay.sampler=prioritized", "replay.priority=recency")
    async with dataprep(config) as (service, loop):
        fence = await service.store.run.lead("dataprep-0:boot", 60.0)
        assert fence is not None
        assert await loop._rebase(fence, 5000) == 4992, "a restore without groups removes the base"
        assert await service.store.replay.recency_base() == 4992
        await service.store.restores.delete_run()


async def test_a_leader_that_stays_out_of_step_pauses_and_says_so(tmp_path: Path, server: RedisServer) -> None:
    config = configured(tmp_path, server)
    async with dataprep(config) as (service, loop):
        store, first = service.store, int(permutation(config.run.seed, 0, 40)[0])
        await store.client.setbit(store.keys.trained(0), first, 1)  # its ticket can never be issued
        running, began = asyncio.create_task(service.run(loop.work)), time.monotonic()
        with capture_logs() as logs:
            await wait_until(lambda: "out of step with the run" in loop.why_unready(), 20)
        attempts = sum("out of step" in event["event"] for event in logs)
        assert attempts == OUT_OF_STEP
        assert time.monotonic() - began > (attempts - 3) * 0.9 * IDLE_S, (
            "the first is repeated at once, and a notification ends a wait"
        )
        assert loop.why_unready().endswith(f"{OUT_OF_STEP} times in a row, the last time: ticket 0-{first} was issued before")
        await store.client.setbit(store.keys.trained(0), first, 0)
        await wait_until(lambda: _has(store, "tickets", 16))
        await wait_until(lambda: not loop.why_unready())
        service.stop()
        await running
        await store.restores.delete_run()


async def test_a_run_that_has_trained_all_its_steps_is_not_stopped_for_lack_of_prompts(
    tmp_path: Path, server: RedisServer
) -> None:
    config = configured(tmp_path, server)
    async with dataprep(config) as (service, loop):
        running = asyncio.create_task(service.run(loop.work))
        await train(service.store, config.run.steps)
        loop.issuer.exhausted = "every row is solved"
        await asyncio.sleep(2 * IDLE_S)
        state = await service.store.run.state()
        assert state is not None
        assert state.stopping == "", "it would abandon the last evaluation round"
        service.stop()
        await running
        await service.store.restores.delete_run()


async def test_a_run_without_prompts_that_is_to_be_restored_is_not_stopped(tmp_path: Path, server: RedisServer) -> None:
    config = configured(tmp_path, server)
    async with dataprep(config) as (service, loop):
        store = service.store
        fence = await store.run.lead("dataprep-0:boot", 60.0)
        assert fence is not None
        await store.steps.publish(await store.run.attach_trainer(), 0)
        await store.run.request_restore(2)
        loop.issuer.exhausted = "every row is solved"
        state = await store.run.state()
        assert state is not None
        assert not await loop._turn(fence, state)
        await store.restores.delete_run()


async def test_a_run_whose_requeued_tickets_wait_for_memory_is_not_stopped(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with dataprep(configured(tmp_path, server)) as (service, loop):
        store = service.store
        fence = await store.run.lead("dataprep-0:boot", 60.0)
        assert fence is not None
        await store.steps.publish(await store.run.attach_trainer(), 0)
        assert await store.tickets.issue(fence, 0, [ticket(0)], b"", {}) == 1
        for claim in await flow.claim(store, "g"):
            await store.tickets.fail("g", claim, "the verifier broke", 1)
        await store.dead_letters.requeue([letter.id for letter in await store.dead_letters.page()])
        loop.issuer.exhausted, loop.issuer._cursor = "every row is solved", 1

        async def turn() -> RunState:
            state = await store.run.state()
            assert state is not None
            await loop._turn(fence, state)
            state = await store.run.state()
            assert state is not None
            return state

        used, limit = 95, 100
        monkeypatch.setattr(store.run, "memory", lambda: _soon((used, limit)))
        assert (await turn()).stopping == ""
        assert loop.memory.why
        used, loop.memory._looked = 10, float("-inf")
        assert (await turn()).stopping == ""
        assert await store.tickets.requeued(1) == [], "it is issued again"
        (claim,) = await flow.claim(store, "g")
        await store.tickets.fail("g", claim, "the verifier broke", 1)
        assert (await turn()).stopping == "every row is solved"
        await store.restores.delete_run()


async def _soon(value: T) -> T:
    return value


async def test_a_fork_with_fewer_slots_samples_nothing_that_would_become_stale(tmp_path: Path, server: RedisServer) -> None:
    async with dataprep(configured(tmp_path / "origin", server)) as (service, loop):
        store, running = service.store, asyncio.create_task(service.run(loop.work))
        trainer, _ = await claim_all(store)
        await store.snapshots.save(trainer, -1, tmp_path / "snapshot", payloads=True)
        service.stop()
        await running
        await store.restores.delete_run()
    config = configured(tmp_path / "fork", server, "admission.max_staleness=0")
    async with dataprep(config) as (service, loop):
        store = service.store
        await store.restores.restore(await store.run.attach_trainer(), Snapshot(tmp_path / "snapshot"), True, lambda: None)
        running = asyncio.create_task(service.run(loop.work))
        plans = await train(store, 4)
        assert {plan.stats["staleness/trained/max"] for plan in plans} == {0.0}
        assert [group for plan in plans for group in plan.groups] == [
            f"0-{row}" for row in permutation(config.run.seed, 0, 40)[:32]
        ]
        audit = await store.run.audit()
        assert (audit["ledger:reissued"], audit["ledger:issued"], audit["ledger:trained"]) == (16, 32, 32)
        service.stop()
        await running
        await store.restores.delete_run()
