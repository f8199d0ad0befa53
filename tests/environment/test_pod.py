"""Environment pods on a real Redis, with real worker processes and, over HTTP, a generator with the scripted engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.config import RunConfig
from services.console.run.redis_server import RedisServer
from services.dataprep.evaluation_report import read_results
from services.environment.loop import EnvironmentLoop
from services.environment.pod import EnvironmentPod
from services.generator.api import add_routes
from services.generator.loop import GeneratorLoop
from services.groups.generated import Generated, SamplingParameters
from services.http.entry import open_service
from services.protocol import codec
from services.protocol.errors import RedisUnreachable
from services.protocol.messages import Header, Row, Ticket
from services.protocol.payloads import Payload
from services.runtime.loops import Fatal, Loop, end_tasks
from services.runtime.service import Service
from services.store import Store
from services.verifiers.scoring import Scoring
from tests.environment.support.templates import FAMILIES, save_family
from tests.generator.test_loop import generator
from tests.support import flow
from tests.support.harness import buried, ticket, wait_until
from tests.support.scripted import ScriptedEngine

PROGRAMS = Path(__file__).parent / "support" / "programs.py"
N = 2


def overrides(folder: Path, kind: str, name: str, **keys: Any) -> list[str]:
    given = {"name": "world", "kind": kind, "run" if kind == "agent" else "function": f"{PROGRAMS}:{name}", **keys}
    shown = ", ".join(f"{key} = {msgspec.json.encode(value).decode()}" for key, value in given.items() if key != "options")
    options = ", ".join(f"{key} = {msgspec.json.encode(value).decode()}" for key, value in keys.get("options", {}).items())
    return [
        f'data.sources=[{{kind = "jsonl", path = "{folder / "data.jsonl"}", environment = "world"}}]', "verifiers=[]",
        f"environments=[{{{shown}, options = {{{options}}}}}]", "data.chat_template=true", "model.max_tokens=4096",
        "trainer.row_tokens=4096", "sampling.max_tokens=12", "fleet.ttl_s=2", "generator.drain_s=0",
    ]  # fmt: skip


@asynccontextmanager
async def fleet(folder: Path, server: RedisServer, *given: str) -> AsyncIterator[tuple[Service, ScriptedEngine]]:
    """Yield a generator that serves environments, in a run with published weights: its service and engine."""
    async with serving(folder, server, *given) as (loop, engine):
        yield loop.service, engine


@asynccontextmanager
async def serving(folder: Path, server: RedisServer, *given: str) -> AsyncIterator[tuple[GeneratorLoop, ScriptedEngine]]:
    """Yield the loop and engine of a generator that serves environments, in a run with published weights."""
    (folder / "model").mkdir()
    save_family(FAMILIES[0], folder / "model")
    async with generator(folder, server, *given) as (service, loop, engine):
        add_routes(service, loop)
        await service.view.refresh()
        await service.store.fleet.beat(service.status, 60)
        follow = asyncio.create_task(_beat(service))
        try:
            yield loop, engine
        finally:
            await end_tasks([follow])


async def _beat(service: Service) -> None:
    while True:
        await service.view.refresh()
        await service.store.fleet.beat(service.status, 60)
        await asyncio.sleep(0.1)


@asynccontextmanager
async def environment(config: RunConfig, name: str = "environment-0") -> AsyncIterator[EnvironmentPod]:
    """Yield a running environment pod, which is killed at the end, so it does not release its tickets."""
    async with open_service("environment", config, name) as service:
        pod = EnvironmentPod(service)
        running = asyncio.create_task(pod.run())
        try:
            yield pod
        finally:
            await pod.loop.tickets.close()
            await end_tasks([running])


async def issue(store: Store, *rows: int) -> None:
    fence = await store.run.lead("test", 60_000)
    tickets = [_ticket(row) for row in rows]
    assert await store.tickets.issue(fence, rows[0], tickets, b"order", {}, 0, {"main"}) == len(rows)


def _ticket(row: int) -> Ticket:
    encoded = msgspec.json.encode(Row([{"role": "user", "content": f"say {row}"}], {"difficulty": row})).decode()
    return ticket(row, row=encoded, group_size=N)


async def groups(store: Store, count: int) -> list[tuple[Header, Payload]]:
    """Wait for `count` submitted groups; return them."""

    async def there() -> bool:
        return await store.client.xlen(store.keys.headers) == count

    await wait_until(there)
    entries = await store.client.xrange(store.keys.headers)
    headers = [codec.decode(fields[b"body"], Header) for _, fields in entries]
    payloads = [codec.unseal(await store.client.get(store.keys.payload(header.payload)) or b"") for header in headers]
    return [(header, codec.decode(data, Payload)) for header, data in zip(headers, payloads, strict=True)]


async def test_a_custom_class_runs_in_every_rollout(tmp_path: Path, server: RedisServer) -> None:
    given = [*overrides(tmp_path, "python", "Echo"), f"sampling.group_size={N}"]
    async with fleet(tmp_path, server, *given) as (service, _), environment(service.config):
        await issue(service.store, 0, 1)
        for header, payload in await groups(service.store, 2):
            assert header.rewards == [1.0] * N
            assert header.scores == {"world": [1.0] * N, "world.turns": [3.0] * N}
            assert (header.turns, header.truncated) == ([3] * N, [False] * N)
            assert header.tool_calls == header.malformed_calls == [0] * N
            sampled = sum(header.lengths) - sum(header.tool_tokens)
            assert 3 * N <= sampled < len(payload.tokens)


async def test_rollouts_resume_when_their_pod_is_killed(tmp_path: Path, server: RedisServer) -> None:
    log = tmp_path / "log"
    given = overrides(tmp_path, "python", "Echo", options={"turns": 6, "log": str(log)})
    async with fleet(tmp_path, server, *given, f"sampling.group_size={N}") as (service, engine):
        engine._token_s = 0.01
        async with environment(service.config):
            await issue(service.store, 0)
            await wait_until(lambda: log.exists() and log.read_text().count("turn 2") >= N)
        async with environment(service.config, "environment-1"):
            [(header, _)] = await groups(service.store, 1)
        assert (header.rewards, header.turns) == ([1.0] * N, [6] * N)
        lines = Counter(log.read_text().split("\n"))
        assert lines["start 0"] == N
        restored = sum(count for line, count in lines.items() if line.startswith("restore"))
        assert restored >= N, "a lease that expires on a busy machine restores a rollout once more, but never restarts it"
        assert await service.store.client.exists(service.store.keys.turns("0-0")) == 0


async def test_a_pod_adopts_its_own_tickets_after_its_first_claim_was_refused(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [*overrides(tmp_path, "python", "Echo"), f"sampling.group_size={N}", "fleet.ttl_s=40"]
    async with fleet(tmp_path, server, *given) as (service, _):
        await issue(service.store, 0)
        held = await flow.claim(service.store, "environment-0", lease_s=600, rollouts=True)
        assert len(held) == 1, "by the pod's earlier process"
        flow.refuse_first_claim(monkeypatch)
        async with environment(service.config):
            await groups(service.store, 1)


async def test_environments_evaluate_the_version_a_generator_holds(tmp_path: Path, server: RedisServer) -> None:
    given = [
        *overrides(tmp_path, "python", "Echo", solved_at=1.0), "evaluation.every_steps=10", "evaluation.samples=2",
        "evaluation.temperature=0.5",
        f'evaluation.sources=[{{kind = "jsonl", path = "{tmp_path / "data.jsonl"}", name = "held_out", environment = "world"}}]',
    ]  # fmt: skip
    async with serving(tmp_path, server, *given) as (loop, engine), environment(loop.config) as pod:
        store, duty, said = loop.service.store, loop.evaluation, Row([{"role": "user", "content": "say it"}], {})
        asked: list[SamplingParameters] = []
        generate = engine.generate

        async def generated(*args: Any) -> Generated:
            asked.append(args[3])
            return await generate(*args)

        engine.generate = generated
        row = msgspec.json.encode(said).decode()
        tickets = [ticket(i, id=f"held_out:{i}", version=0, source="held_out", row=row, group_size=2) for i in range(3)]
        fence = await store.run.lead("test", 60_000) or 0
        assert await store.evaluation.open(fence, 0, tickets, loop.config.sources_with_environment)
        working = asyncio.create_task(loop.work(Loop("work", loop.work, 60)))
        await duty.offer()
        assert (duty.version, loop.service.status.phase) == (0, "evaluating")

        async def answered() -> bool:
            found = (await store.evaluation.state(60)).round
            return found is not None and found.done == len(tickets)

        await wait_until(answered)
        await wait_until(lambda: duty.version is None)
        assert loop.service.status.phase == "ready"
        results = read_results(tickets, await store.evaluation.results())
        for result in results:  # a truncated rollout has fewer turns
            assert [reward == 1.0 for reward in result.rewards] == [not cut for cut in result.truncated]
            assert result.correct == result.rewards.count(1.0)
        assert {sampling.temperature for sampling in asked} == {0.5}
        assert not pod.loop.tickets.held
        await end_tasks([working])


async def test_a_program_that_raises_or_dies_restarts_its_own_rollout(tmp_path: Path, server: RedisServer) -> None:
    (tmp_path / "calls").mkdir()
    given = overrides(tmp_path, "python", "Fragile", options={"folder": str(tmp_path / "calls")})
    async with fleet(tmp_path, server, *given, f"sampling.group_size={N}") as (service, _), environment(service.config):
        await issue(service.store, 0)
        [(header, _)] = await groups(service.store, 1)
        assert (header.rewards, header.turns) == ([1.0] * N, [1] * N)
        assert await buried(service.store) == []


async def test_an_agent_uses_the_openai_client(tmp_path: Path, server: RedisServer) -> None:
    given = [*overrides(tmp_path, "agent", "agent", options={"questions": 3}), f"sampling.group_size={N}"]
    async with fleet(tmp_path, server, *given) as (service, _), environment(service.config):
        await issue(service.store, 0)
        [(header, payload)] = await groups(service.store, 1)
        assert (header.rewards, header.turns) == ([3.0] * N, [3] * N)
        assert header.rollout == [0, 0, 0, 1, 1, 1]  # each conversation is a segment
        assert len(header.context_tokens) == len(payload.context_lengths) == 6


async def test_parts_that_not_all_rollouts_of_a_group_have_are_omitted(tmp_path: Path, server: RedisServer) -> None:
    """As those of verifiers; a missing score counts as 0."""
    given = [*overrides(tmp_path, "python", "Uneven", processes=1), f"sampling.group_size={N}"]
    given += ['verifiers=[{kind="regex", pattern="no such text"}]']
    async with fleet(tmp_path, server, *given) as (service, _), environment(service.config):
        await issue(service.store, 0)
        [(header, _)] = await groups(service.store, 1)
        assert header.scores == {"regex": [0.0] * N, "world": [1.0] * N, "world.always": [2.0] * N}
        await issue(service.store, 1)
        _, (header, _) = await groups(service.store, 2)
        assert sorted(header.scores["world"]) == [0.0, 1.0]
        assert header.scores.keys() == {"regex", "world"}


async def test_a_class_without_a_score_solves_nothing_by_its_own_threshold(tmp_path: Path, server: RedisServer) -> None:
    given = [*overrides(tmp_path, "python", "Silent", solved_at=1.0), f"sampling.group_size={N}"]
    given += ['verifiers=[{kind="regex", pattern=".", solved_at=1.0}]']
    async with fleet(tmp_path, server, *given) as (service, _), environment(service.config):
        await issue(service.store, 0)
        [(header, _)] = await groups(service.store, 1)
        assert header.scores == {"regex": [1.0] * N, "world": [0.0] * N}
        assert (header.rewards, header.solved) == ([1.0] * N, [False] * N)


async def test_a_long_outage_of_redis_loads_nothing_twice(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second start would hand each verifier worker to two groups at a time."""
    given = [*overrides(tmp_path, "python", "Silent"), f"sampling.group_size={N}", 'verifiers=[{kind="regex", pattern="."}]']
    outage, starts, claim, start = [RedisUnreachable("no answer for 9 s")] * 2, [], EnvironmentLoop.claim, Scoring.start

    async def failing(self: EnvironmentLoop) -> int:
        if outage:
            raise outage.pop()
        return await claim(self)

    async def starting(self: Scoring) -> None:
        starts.append(self)
        await start(self)

    monkeypatch.setattr(EnvironmentLoop, "claim", failing)
    monkeypatch.setattr(Scoring, "start", starting)
    async with fleet(tmp_path, server, *given) as (service, _), environment(service.config) as pod:
        await issue(service.store, 0)
        await groups(service.store, 1)
        assert not outage
        assert starts.count(pod.verifiers) == 1


async def test_a_drain_without_redis_ends_all_rollouts(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [*overrides(tmp_path, "python", "Silent"), f"sampling.group_size={N}", "generator.engine_options.token_s=5"]
    async with fleet(tmp_path, server, *given) as (service, _), environment(service.config) as pod:
        still: list[int] = []

        async def unreachable(*_: object) -> None:
            still.append(len(pod.loop.tickets.held))
            raise RedisUnreachable("no answer")

        monkeypatch.setattr("services.store.tickets.Tickets.release", unreachable)
        await issue(service.store, 0, 1)
        await wait_until(lambda: len(pod.loop.tickets.held) == 2)
        pod.service.stop()
        await wait_until(lambda: bool(still))
        assert still == [0]


async def test_verifiers_see_the_tokens_of_the_last_reply(tmp_path: Path, server: RedisServer) -> None:
    own = tmp_path / "own.py"
    own.write_text("def score(tokens): return [float(len(each)) for each in tokens]\n")
    whole = f'{{kind="python", function="{own}:score", scope="group"}}'
    given = [*overrides(tmp_path, "python", "Silent"), f"sampling.group_size={N}", "sampling.max_tokens=16"]
    given += [f'verifiers=[{whole}, {{kind="length", soft_tokens=16}}]']
    async with fleet(tmp_path, server, *given) as (service, _), environment(service.config):
        await issue(service.store, 0)
        [(header, _)] = await groups(service.store, 1)
        assert all(0 < length <= 16 for length in header.scores["python"])
        assert header.scores["length"] == [pytest.approx(-length / 16) for length in header.scores["python"]]


@pytest.mark.parametrize(("max_tokens", "finish"), [(64, "stop"), (1, "length")])
async def test_verifiers_see_how_the_last_reply_of_a_truncated_rollout_ended(
    tmp_path: Path, server: RedisServer, max_tokens: int, finish: str
) -> None:
    own = tmp_path / "own.py"
    own.write_text("def score(finish, wanted): return [float(each == wanted) for each in finish]\n")
    verifier = f'{{kind="python", function="{own}:score", scope="group", options={{wanted="{finish}"}}}}'
    given = [*overrides(tmp_path, "python", "Echo", max_turns=1), f"sampling.group_size={N}", f"verifiers=[{verifier}]"]
    async with fleet(tmp_path, server, *given, f"sampling.max_tokens={max_tokens}") as (service, _):
        async with environment(service.config):
            await issue(service.store, 0)
            [(header, _)] = await groups(service.store, 1)
        assert (header.truncated, header.scores["python"]) == ([True] * N, [1.0] * N)


async def test_an_agent_that_returns_no_reward_fails(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.environment.group.MAX_ATTEMPTS", 1)
    given = [*overrides(tmp_path, "agent", "forgetful"), f"sampling.group_size={N}"]
    async with fleet(tmp_path, server, *given) as (service, _), environment(service.config):
        await issue(service.store, 0)
        await wait_until(lambda: buried(service.store))
        [(ticket, reason)] = await buried(service.store)
        assert (ticket, 'no reward: its program gave none, and no verifier scores source "main"' in reason) == ("0-0", True)


async def test_a_pod_ends_its_verifiers_although_closing_its_programs_is_cancelled(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [*overrides(tmp_path, "python", "Echo"), 'verifiers=[{kind="exact"}]']
    async with fleet(tmp_path, server, *given) as (service, _), open_service("environment", service.config, "one") as opened:
        pod = EnvironmentPod(opened)
        [pool], [verifiers], closing = pod.pools.values(), pod.verifiers.pools, list[str]()
        close = pool.close

        async def hang() -> None:
            closing.append("programs")
            await asyncio.sleep(600)

        monkeypatch.setattr(pool, "close", hang)
        running = asyncio.create_task(pod.run())
        await wait_until(pod._loaded.is_set)
        await end_tasks([running])  # cancels again while it closes
        assert closing == ["programs"]
        assert not any(worker.alive for worker in verifiers._workers)
        await close()


@pytest.mark.parametrize(("name", "why"), [("Absent", "has no 'Absent'"), ("agent", "is not a class")])
async def test_unusable_code_stops_the_pod_with_the_reason(name: str, why: str, tmp_path: Path, server: RedisServer) -> None:
    async with (
        fleet(tmp_path, server, *overrides(tmp_path, "python", name)) as (service, _),
        open_service("environment", service.config, "environment-0") as opened,
    ):
        with pytest.raises(Fatal, match=why):
            await EnvironmentPod(opened).run()
