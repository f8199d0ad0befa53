"""Evaluation during training: real Redis, real sync rounds in flight, scripted engines; generators are killed.

Every engine records which versions sampled which tokens, so that the report of a round can be verified. A test that acts during a
round holds the engines until it has acted: a round of slow engines, too, may end before a busy machine continues the test.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.console.run.redis_server import RedisServer
from services.dataprep.evaluation_rounds import EvaluationRounds, hopeless
from services.dataprep.metrics import EvaluationMetrics
from services.dataprep.prompts.catalogue import Prompt
from services.dataprep.prompts.order import SourceSpan
from services.groups.generated import Generated, SamplingParameters
from services.protocol.messages import PodStatus
from services.runtime.loops import end_tasks
from services.runtime.tracing import TraceRecorder
from services.store import RunState
from services.store.evaluation import EvaluationRound
from services.trainer.loop import TrainLoop
from tests.support.harness import ticket, wait_until
from tests.support.rounds_world import World, open_world
from tests.support.scripted import ScriptedEngine

PROMPTS, SAMPLES = 10, 2
NONE, ANY = -1, 1 << 30  # versions to sample with


class Rows:
    """Prompts of two evaluation sources."""

    spans = (SourceSpan("easy", 1.0, 0, 4), SourceSpan("hard", 1.0, 4, PROMPTS - 4))

    def prompt(self, row: int) -> Prompt:
        return Prompt([5, 6, 20 + row], str(row), "")


class Noting(ScriptedEngine):
    """An engine that records the versions that every finished completion was sampled with, by ticket."""

    def __init__(self, last: int = ANY) -> None:
        """`last` is the last version to sample with: with later ones the engine is held."""
        super().__init__()
        self.last = last
        self.sampled: list[tuple[str, set[int]]] = []

    def _held(self) -> bool:
        return self.version > self.last

    async def generate(
        self, request_id: str, prompt: list[int], seed: int, sampling: SamplingParameters, prefix: Generated | None = None
    ) -> Generated:
        done = await super().generate(request_id, prompt, seed, sampling, prefix)
        self.sampled.append((request_id.partition(".")[0], {span.version for span in done.spans}))
        return done


class Noted(TraceRecorder):
    """Collects recorded spans."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[tuple[str, str, dict[str, Any]]] = []

    def begin(self, always: bool = False) -> str:
        return "a trace" if always else ""

    def record(self, name: str, context: str, started: float, ended: float | None = None, **attributes: Any) -> None:
        self.spans.append((name, context, attributes))


class Lead:
    """A leader that only runs evaluations."""

    def __init__(self, world: World) -> None:
        self.world, self.store = world, world.store
        self.fence = self._call(self.store.run.lead("leader:boot", 60.0))
        self.registry, self.tracing = CollectorRegistry(), Noted()
        self.turn = asyncio.Lock()
        metrics = EvaluationMetrics(self.registry)
        self.evaluation = EvaluationRounds(world.config, self.store, Rows(), metrics, self.tracing)  # type: ignore[arg-type]
        self.task = self._call(self._start())

    def _call(self, work: Any) -> Any:
        return self.world.portal.call(work)

    async def _start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._lead())

    async def _lead(self) -> None:
        while True:
            async with self.turn:
                state = await self.store.run.state()
                assert state is not None
                done = await self.evaluation.tend(self.fence, state)
            await asyncio.sleep(0 if done else 0.02)

    def wait_for(self, dealt_with: int) -> None:
        """Wait until the rounds up to a version are over, and the leader has counted them."""

        async def over() -> bool:
            async with self.turn:  # in the middle of a turn, Redis may know more than metrics and traces
                seen = await self.store.evaluation.state(60)
            return self.task.done() or (seen.dealt_with >= dealt_with and seen.round is None)

        self._call(wait_until(over))
        assert not self.task.done(), self.task.exception()

    def wait_for_results(self, count: int) -> None:
        """Wait until a round is open and has this many completed prompts."""

        async def so_many() -> bool:
            found = (await self.store.evaluation.state(60)).round
            return found is not None and found.done >= count

        self._call(wait_until(so_many))

    def reports(self) -> dict[int, dict[str, float]]:
        return {int(record["eval/version"]): record for _, record in self._call(self.store.evaluation.records())}

    def ledger(self, name: str) -> int:
        return self._call(self.store.run.audit()).get(f"ledger:{name}", 0)

    def shown(self, metric: str, **labels: str) -> float | None:
        """Return a metric of the rounds."""
        return self.registry.get_sample_value(f"grpo_evaluation_{metric}", labels)

    def check_no_key_left(self) -> None:
        async def keys() -> list[bytes]:
            return [key async for key in self.store.client.scan_iter("*:eval:*")]

        assert self._call(keys()) == []


@contextmanager
def leading(folder: Path, server: RedisServer, *overrides: str) -> Iterator[tuple[World, Lead]]:
    """Yield a run without members whose first round is open."""
    sources = ", ".join(f"{{kind='jsonl', name='{span.name}', path='none.jsonl'}}" for span in Rows.spans)
    given = (
        "generator.count=3", "evaluation.every_steps=2", f"evaluation.sources=[{sources}]", "run.steps=6",
        f"evaluation.samples={SAMPLES}", "generator.engine_options.token_s=0.002",
        "fleet.ttl_s=3.0", *overrides,
    )  # fmt: skip
    with open_world(folder, server, *given) as world:
        lead = Lead(world)
        try:
            lead.wait_for_results(0)
            yield world, lead
        finally:
            world.portal.call(end_tasks([lead.task]))


def members(world: World, *names: str, last: int = ANY) -> dict[str, Noting]:
    """Add generators that sample with versions up to `last`."""
    engines = {name: Noting(last) for name in names}
    for name, engine in engines.items():
        world.member(name, engine)
    return engines


def volunteers(world: World) -> list[str]:
    return [name for name, loop in world.loops.items() if loop.evaluating]


def held_volunteers(world: World, count: int = 1) -> list[str]:
    """Wait until so many generators have claimed tickets, which they do not complete because their engines are held."""
    world.portal.call(wait_until(lambda: sum(bool(world.loops[name].tickets.held) for name in volunteers(world)) == count))
    return volunteers(world)


def test_rounds_use_one_version_while_training_continues(tmp_path: Path, server: RedisServer) -> None:
    with leading(tmp_path, server, "generator.engine_options.token_s=0.01", "sync.deadline_s=10") as (world, lead):
        engines = members(world, "a", "b", "c")
        world.train(0)
        world.portal.call(world.store.tickets.issue(lead.fence, 0, [ticket(i) for i in range(16)]))
        slowest = max(world.train(version).total_s for version in range(1, 7))
        lead.wait_for(6)
        reports = lead.reports()
        assert {0, 6} <= set(reports) <= {0, 2, 4, 6}
        dealt = sum(lead.ledger(name) for name in ("evaluations", "evaluations_abandoned", "evaluations_skipped"))
        assert dealt == 4, "a round was neither reported nor counted as abandoned or skipped"
        ended = {outcome: lead.shown("rounds_total", outcome=outcome) for outcome in ("complete", "abandoned", "skipped")}
        assert ended == {
            "complete": len(reports),
            "abandoned": lead.ledger("evaluations_abandoned"),
            "skipped": lead.ledger("evaluations_skipped"),
        }
        assert lead.shown("completions_total") == len(reports) * PROMPTS * SAMPLES
        assert lead.shown("seconds_sum") == pytest.approx(sum(record["eval/wall_s"] for record in reports.values()))
        assert lead.shown("metric", name="eval/version") == 6
        assert lead.shown("metric", name="eval/hard/pass@2") == reports[6]["eval/hard/pass@2"]
        spans = [span for span in lead.tracing.spans if span[0] == "evaluate"]
        complete = [span[2]["version"] for span in spans if span[2]["outcome"] == "complete"]
        assert (complete, {span[1] for span in spans}) == (sorted(reports), {"a trace"})
        assert slowest < world.config.sync.answer_s, "a sync round waited for an evaluating generator"
        lead.check_no_key_left()

        sampled = [note for engine in engines.values() for note in engine.sampled if ":" in note[0]]
        assert all(len(versions) == 1 for _, versions in sampled)
        for version, record in reports.items():
            completions = Counter(name for name, versions in sampled if versions == {version})
            assert len(completions) == PROMPTS
            assert min(completions.values()) == SAMPLES, "more only if a lease expired while the machine was stalled"
            assert (record["eval/easy/prompts"], record["eval/hard/prompts"], record["eval/all/prompts"]) == (4, 6, PROMPTS)
            assert (record["eval/all/pass@1"], record["eval/all/pass@2"]) == (0.5, 1.0)

        async def trained() -> bool:
            return (await world.store.run.audit())["headers"] == 16

        world.portal.call(wait_until(trained))
        items = world.portal.call(world.store.replay.read_headers(lead.fence, 100))
        assert {item.header.source for item in items if item.header} == {"main"}
        world.portal.call(wait_until(lambda: not volunteers(world)))
        world.rounds.catch_up(6)
        assert world.versions() == {"a": 6, "b": 6, "c": 6}


def test_another_volunteer_takes_over_from_a_killed_one(tmp_path: Path, server: RedisServer) -> None:
    two = ("generator.max_num_seqs=4", "evaluation.max_generators=2")
    with leading(tmp_path, server, *two) as (world, lead):
        engines = members(world, "a", "b", "c", last=NONE)
        world.train(0)
        victim, other = held_volunteers(world, 2)
        world.kill(victim)
        world.train(1)
        engines[other].last = ANY
        lead.wait_for(0)
        assert set(lead.reports()) == {0}
        lead.check_no_key_left()


def test_a_round_without_volunteers_is_not_reported(tmp_path: Path, server: RedisServer) -> None:
    with leading(tmp_path, server) as (world, lead):
        members(world, "a", "b", last=NONE)
        world.train(0)
        (victim,) = held_volunteers(world)
        world.kill(victim)
        world.train(1)
        lead.wait_for(0)
        assert lead.reports() == {}
        assert lead.ledger("evaluations_abandoned") == lead.shown("rounds_total", outcome="abandoned") == 1
        assert [span[2]["outcome"] for span in lead.tracing.spans] == ["abandoned"]
        seen = world.portal.call(world.store.evaluation.state(60))
        assert seen.abandoned == "version 0: no generator has version 0 anymore"
        lead.check_no_key_left()
        world.train(2)


def test_a_round_that_none_may_join_is_abandoned_with_the_reason(tmp_path: Path, server: RedisServer) -> None:
    with leading(tmp_path, server) as (world, lead):
        members(world, "a")
        world.train(0)
        world.train(1)
        lead.wait_for(0)
        assert "one generator keeps training" in world.portal.call(world.store.evaluation.state(60)).abandoned
        for version in range(2, 7):
            world.train(version)
        lead.wait_for(6)
        assert 6 in lead.reports(), "after the last version no generator is needed for training"


def test_training_waits_for_the_only_generator_if_configured(tmp_path: Path, server: RedisServer) -> None:
    alone = ("generator.count=1",)
    with leading(tmp_path, server, *alone) as (world, lead):
        engine = members(world, "a", last=NONE)["a"]
        world.train(0)
        assert volunteers(world) == ["a"], "it is reserved for the version before the trainer learns that it holds it"

        def none_took_it() -> bool:
            engine.last = ANY
            return False

        world.train(1, none_took_it)
        lead.wait_for(0)
        assert set(lead.reports()) == {0}, "the weights were replaced before the round was complete"
        assert all(versions == {0} for _, versions in engine.sampled)
        assert world.versions() == {"a": 1}


def test_a_generator_that_replaces_the_last_volunteer_gets_the_last_weights(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.trainer.loop.FINAL_S", 30.0)
    alone = ("generator.count=1", "run.steps=1")
    with leading(tmp_path, server, *alone) as (world, lead):
        members(world, "a", last=0)
        world.train(0)
        lead.wait_for(0)
        world.train(1)
        (victim,) = held_volunteers(world)
        world.kill(victim)
        members(world, "b")
        recovery = SimpleNamespace(stay_in_step=lambda step: world.portal.call(world.store.run.state()))
        updates = SimpleNamespace(catch_up=lambda: world.rounds.catch_up(1))
        trainer: Any = SimpleNamespace(
            config=world.config, store=world.store, call=world.portal.call, notifications=world.rounds.notifications,
            updates=updates, recovery=recovery, step=0, _say=lambda **_: None, _tick=lambda: None,
        )  # fmt: skip
        TrainLoop._await_evaluation(trainer)
        assert set(lead.reports()) == {0, 1}


def test_a_completion_of_two_versions_is_rejected(tmp_path: Path, server: RedisServer) -> None:
    with leading(tmp_path, server, "generator.engine_options.token_s=0.02") as (world, lead):
        engines = members(world, "a", "b", last=NONE)
        world.train(0)
        (name,) = held_volunteers(world)

        async def load() -> None:
            engines[name].last = ANY
            await wait_until(lambda: engines[name].gauges().tokens > 0)
            engines[name].version = 1  # as if new weights had been loaded unnoticed

        world.portal.call(load())  # in the engine's loop, which samples no token meanwhile
        lead.wait_for(0)
        assert "sampled by policy versions" in world.portal.call(world.store.evaluation.state(60)).abandoned
        assert lead.reports() == {}
        lead.check_no_key_left()


def test_a_draining_volunteer_hands_back_its_tickets_at_once(tmp_path: Path, server: RedisServer) -> None:
    long_leases = ("fleet.ttl_s=40", "evaluation.max_generators=1")
    with leading(tmp_path, server, *long_leases) as (world, lead):
        engines = members(world, "a", "b", "c", last=NONE)
        world.train(0)
        (name,) = held_volunteers(world)
        world.portal.call(world.loops[name].drain())
        for engine in engines.values():
            engine.last = ANY
        lead.wait_for(0)
        assert set(lead.reports()) == {0}, "another generator that holds the version did not take over"
        assert not world.loops[name].evaluating


def test_a_new_leader_finishes_the_round_and_reports_it_once(tmp_path: Path, server: RedisServer) -> None:
    two = ("generator.max_num_seqs=4", "evaluation.max_generators=2")  # one leaves tickets to the other
    with leading(tmp_path, server, *two) as (world, lead):
        engines = members(world, "a", "b", "c", last=NONE)
        world.train(0)
        first, second = held_volunteers(world, 2)
        engines[first].last = ANY
        lead.wait_for_results(2)
        former = lead.fence

        async def replace() -> None:
            async with lead.turn:
                await world.store.run.step_down("leader:boot")
                lead.fence = await world.store.run.lead("other:boot", 60.0)

        world.portal.call(replace())
        assert lead.fence > former
        engines[second].last = ANY
        lead.wait_for(0)
        assert [record["eval/version"] for _, record in world.portal.call(world.store.evaluation.records())] == [0.0]


def test_rounds_due_while_another_is_open_are_skipped(tmp_path: Path, server: RedisServer) -> None:
    with leading(tmp_path, server) as (world, lead):
        engines = members(world, "a", "b", last=NONE)
        world.train(0)
        held_volunteers(world)
        for version in range(1, 6):
            world.train(version)
        for engine in engines.values():
            engine.last = ANY
        lead.wait_for(4)
        assert set(lead.reports()) == {0}
        assert lead.ledger("evaluations_skipped") == lead.shown("rounds_total", outcome="skipped") == 2
        world.train(6)
        lead.wait_for(6)
        assert set(lead.reports()) == {0, 6}


def test_a_stopped_run_abandons_its_round(tmp_path: Path, server: RedisServer) -> None:
    with leading(tmp_path, server) as (world, lead):
        members(world, "a", "b", last=NONE)
        world.train(0)
        held_volunteers(world)
        world.portal.call(world.store.run.stop("a test"))
        lead.wait_for(0)
        assert world.portal.call(world.store.evaluation.state(60)).abandoned == "version 0: the run is ending: a test"
        lead.check_no_key_left()
        world.portal.call(wait_until(lambda: not volunteers(world)))


def test_every_round_has_the_same_prompts_and_seeds(tmp_path: Path, server: RedisServer) -> None:
    with leading(tmp_path, server, "evaluation.prompts=3") as (_, lead):
        first, second = lead.evaluation.tickets(0), lead.evaluation.tickets(2)
        assert [one.id for one in first] == ["easy:0", "easy:1", "easy:2", "hard:0", "hard:1", "hard:2"]
        assert [one.seed for one in first] == [one.seed for one in second]
        assert {one.version for one in second} == {2}
        assert len({one.seed for one in first}) == 6


def _round(**fields: Any) -> EvaluationRound:
    return EvaluationRound(
        **({"version": 2, "total": 4, "done": 1, "volunteers": 0, "started": True, "wall_s": 1.0, "fault": ""} | fields)
    )


def _state(published: int, stopping: str = "") -> RunState:
    return RunState(6, 8, 0, 0, published, published, published - 1, -1, "", {}, stopping, "", "", "")


@pytest.mark.parametrize(
    ("found", "state", "held", "last_s", "why"),
    [
        (_round(), _state(2), 0, 0.0, ""),
        (_round(volunteers=1), _state(5), 0, 0.0, ""),
        (_round(), _state(3), 1, 0.0, ""),
        (_round(), _state(3), 0, 0.0, "no generator has version 2 anymore"),
        (_round(started=False), _state(3), 0, 0.0, "no generator stayed on version 2 before version 3 was published"),
        (_round(fault="ticket easy:0: broke", volunteers=1), _state(2), 0, 0.0, "ticket easy:0: broke"),
        (_round(volunteers=1), _state(2, "a test"), 0, 0.0, "the run is ending: a test"),
        (_round(volunteers=1), _state(6), 0, 9.0, ""),
        (_round(volunteers=1), _state(6), 0, 11.0, "the last version has been published for 10 s, and"),
    ],
)
def test_a_round_is_abandoned_once_it_cannot_be_completed(
    found: EvaluationRound, state: RunState, held: int, last_s: float, why: str
) -> None:
    pods = [PodStatus("generator", f"g{i}", "boot", "", 0, "", "ready", 2, 1, {}) for i in range(held)]
    others = [
        PodStatus("trainer", "t", "boot", "", 0, "", "ready", 2, 0, {}),
        PodStatus("generator", "x", "b", "", 0, "", "", 3, 1, {}),
    ]
    reason = hopeless(found, state, pods + others, last_s, final_s=10.0)
    assert reason.startswith(why) if why else reason == ""
