"""Several generators: how they share tickets, and what a leaving pod hands over. Real Redis, scripted engines."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from services.config import RunConfig
from services.console.run.redis_server import RedisServer
from services.generator.api import add_routes
from services.generator.concurrency import REASONS
from services.generator.loop import GeneratorLoop
from services.generator.metrics import GeneratorMetrics
from services.http.entry import open_service
from services.protocol.messages import Round
from services.runtime.service import Service
from services.store import Store
from services.weights.rounds.member import WeightFollower
from tests.support.harness import PlainTokenizer, small_config, ticket, wait_until
from tests.support.rounds_world import AnyVerifier
from tests.support.scripted import ScriptedEngine

GROUP = 4


@dataclass
class Pod:
    """A generator that claims tickets."""

    service: Service
    loop: GeneratorLoop
    engine: ScriptedEngine

    def begun(self) -> int:
        """Return the number of tickets with at least one sampled token."""
        return sum(map(self.loop.worker.begun, self.loop.tickets.held.values()))


@asynccontextmanager
async def fleet(*configs: RunConfig, tickets: int, slots: int) -> AsyncIterator[list[Pod]]:
    """Yield pods that hold the published weights, with `tickets` to claim."""
    async with AsyncExitStack() as stack:
        services = [
            await stack.enter_async_context(open_service("generator", config, f"generator-{i}"))
            for i, config in enumerate(configs)
        ]
        store = services[0].store
        await store.run.create("config", "data", 4, slots)
        stack.push_async_callback(store.restores.delete_run)
        sender = await store.run.attach_trainer()
        await store.steps.publish(sender, 0)
        leader = await store.run.lead("test", 60)
        assert leader is not None
        assert await store.tickets.issue(leader, 0, [ticket(i) for i in range(tickets)]) == tickets
        pods, running = [], []
        for service in services:
            engine = ScriptedEngine()
            await engine.start(service.config)
            engine.version = 0
            loop = GeneratorLoop(service, engine, PlainTokenizer(), AnyVerifier(), GeneratorMetrics(service.registry))  # type: ignore[arg-type]
            add_routes(service, loop)
            service.say(phase="ready", version=0, world=1, trainer_fence=sender)
            await store.fleet.beat(service.status, 60.0)  # each pod learns of the others with its first heartbeat
            await service.view.refresh()
            for name, body in (("leases", loop.tickets.renew), ("partials", loop.save_partials), ("concurrency", loop.adapt)):
                service.add_loop(name, body)
            pods.append(Pod(service, loop, engine))
        for pod in pods:
            pod.service.claimers = len(pods)
            running.append(asyncio.create_task(pod.service.run(pod.loop.work)))
        yield pods
        for service in services:
            service.stop()
        await asyncio.gather(*running)


async def headers(store: Store) -> int:
    return (await store.run.audit())["headers"]


async def by_pod(store: Store) -> Counter[str]:
    """Return the number of groups that each pod has submitted."""
    fence = await store.run.lead("test", 60)
    assert fence is not None
    items = await store.replay.read_headers(fence, 1000)
    return Counter(item.header.generator for item in items if item.header is not None)


async def test_groups_are_shared_by_the_speed_of_pods(tmp_path: Path, server: RedisServer) -> None:
    """Each pod could claim everything. Both engines run two groups at a time, one of them eight times as fast as the other."""
    common = ("generator.max_num_seqs=64", "generator.engine_options.max_running=8")
    fast = small_config(tmp_path, server, *common, "generator.engine_options.token_s=0.01", "generator.drain_s=0")
    slow = small_config(tmp_path, server, *common, "generator.engine_options.token_s=0.08", "generator.drain_s=0")
    async with fleet(fast, slow, tickets=80, slots=80) as (quick, lame):
        assert lame.loop.limit.groups == 20
        store = quick.service.store
        await wait_until(lambda: lame.loop.limit.groups < 20)
        unfair = looks = 0

        async def done() -> bool:
            nonlocal unfair, looks
            looks += 1
            unfair += not quick.loop.tickets.held and len(lame.loop.tickets.held) - lame.begun() > 1
            return await headers(store) == 80

        await wait_until(done, 60)
        groups = await by_pod(store)
        assert groups["generator-0"] > groups["generator-1"] > 0
        assert unfair < looks / 10, "tickets were idle in the slow pod while the fast one had none"
        assert (await store.run.audit())["tickets"] == 0
        value = lame.service.registry.get_sample_value
        assert value("grpo_generator_rollouts_limit") == lame.loop.limit.groups
        reasons = {reason: value("grpo_generator_rollouts_limit_reason", {"reason": reason}) for reason in REASONS}
        assert reasons == {reason: float(reason == lame.loop.limit.reason) for reason in REASONS}


async def test_pods_share_the_slots_and_take_over_freed_ones(tmp_path: Path, server: RedisServer) -> None:
    options = ("generator.max_num_seqs=64", "generator.engine_options.token_s=1.0", "generator.drain_s=0")
    config = small_config(tmp_path, server, *options)
    async with fleet(config, config, tickets=12, slots=12) as (one, other):
        await wait_until(lambda: len(one.loop.tickets.held) + len(other.loop.tickets.held) == 12)
        assert (len(one.loop.tickets.held), len(other.loop.tickets.held)) == (6, 6)
        await one.engine.pause()  # so that it does not finish any meanwhile
        other.loop.draining.set()
        other.service.notifications.notify("room")
        await wait_until(lambda: len(one.loop.tickets.held) == 12)  # it claims them beyond its share once they are handed back
        assert not other.loop.tickets.held
        await one.engine.resume()


@pytest.mark.parametrize("how", ["SIGTERM", "POST /v1/drain"])
async def test_a_leaving_pod_claims_no_more_and_hands_back_its_tickets(tmp_path: Path, server: RedisServer, how: str) -> None:
    options = ("generator.max_num_seqs=8", "generator.engine_options.token_s=0.3", "generator.drain_s=0.3")
    config = small_config(tmp_path, server, *options)
    async with fleet(config, tickets=8, slots=8) as (pod,):
        store = pod.service.store
        await wait_until(lambda: pod.engine.gauges().tokens > 8)
        async with httpx.AsyncClient(base_url=pod.service.status.url, headers={"Authorization": "Bearer test-token"}) as http:
            if how == "SIGTERM":
                pod.service.stop()
            else:
                asked = await http.post("/v1/drain", json={"who": "ada", "why": "a new driver"})
                assert asked.json()["draining"]
                assert 0 < asked.json()["rollouts"] <= 4
            await wait_until(lambda: pod.service.status.phase == "draining")
            assert pod.service.status.draining == ("" if how == "SIGTERM" else "ada: a new driver")
            pod.service.say(phase="ready")
            assert pod.service.status.phase == "draining", "a round that ends meanwhile must not make it a member again"
            await wait_until(lambda: not pod.loop.tickets.held)

        async def gone() -> bool:
            return await store.fleet.members(10.0) == []

        await wait_until(gone)
        saved = [await store.tickets.load_partial(f"0-{i}") for i in range(8)]
        audit = await store.run.audit()
        value = pod.service.registry.get_sample_value
        claimed = int(value("grpo_generator_claimed_tickets_total") or 0)
        assert claimed < 8, "it claims no more"
        assert audit["tickets"] + audit["headers"] == 8
        assert 0 < sum(partial is not None for partial in saved) <= claimed - audit["headers"]
        assert audit["ledger:handed_back_tokens"] == value("grpo_generator_handed_back_tokens_total")
        assert audit["ledger:handed_back_tokens"] > 0
        assert value("grpo_generator_handed_back_total", {"reason": "drain"}) == claimed - audit["headers"]


async def test_a_leaving_pod_finishes_the_round_that_includes_it(tmp_path: Path, server: RedisServer) -> None:
    async with fleet(small_config(tmp_path, server), tickets=1, slots=1) as (pod,):
        store, me = pod.service.store, pod.service.status.member
        trainer = await store.run.attach_trainer()
        follower = WeightFollower(pod.service, pod.engine, pod.loop.metrics)

        def current(attempt: int, phase: str, member: str = me) -> Round:
            return Round(1, 1, phase, {member: 1}, 2, "gloo", "", 0, attempt, trainer)

        await store.fleet.set_round(trainer, current(1, "pause"))
        leaving = asyncio.create_task(follower.released(30.0))
        await asyncio.sleep(0.2)
        assert not leaving.done()
        await store.fleet.set_round(trainer, current(1, "done"))
        await asyncio.wait_for(leaving, 20.0)
        await store.fleet.set_round(trainer, current(2, "transfer", "another:boot"))
        await asyncio.wait_for(follower.released(30.0), 20.0)
        await store.fleet.set_round(trainer, current(3, "transfer"))
        await asyncio.wait_for(follower.released(0.1), 20.0)  # the round's leader may be gone
