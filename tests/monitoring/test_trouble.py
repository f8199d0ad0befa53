"""Metrics that change only on problems, or only briefly."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.console.run.redis_server import RedisServer
from services.dataprep import run_gauges
from services.dataprep.metrics import RunMetrics
from services.dataprep.run_gauges import show_run
from services.generator.engines.base import Gauges
from services.generator.metrics import GeneratorMetrics
from services.protocol.messages import PodStatus, Round
from services.runtime.loops import Loop, end_tasks
from services.runtime.metrics import PhaseClock
from services.runtime.service import Service
from services.store import Store
from services.trainer.metrics import TrainerMetrics
from services.verifiers.pool import PoolCounts
from services.weights.rounds.member import WeightFollower
from tests.generator.test_loop import generator, issue
from tests.support.harness import small_config, ticket, wait_until


def pod(kind: str, store: Store, server: RedisServer, folder: Path, *settings: str) -> Service:
    status = PodStatus(kind, f"{kind}-0", "boot", "here", 1, "", "ready", 3, 1, {})
    return Service(kind, small_config(folder, server, f"run.name={store.keys.name}", *settings), store, status)


async def test_a_lost_lease_and_a_late_submission_are_counted(tmp_path: Path, server: RedisServer) -> None:
    # The groups finish between the renewal that finds the leases gone, at 1.5 s, and the expiry that frees them, at 4.5 s.
    async with generator(tmp_path, server, "fleet.ttl_s=3", "generator.engine_options.token_s=0.15") as (service, loop, _):
        value = service.registry.get_sample_value
        await issue(service.store, *[ticket(i) for i in range(2)])
        running = asyncio.create_task(service.run(loop.work))
        await wait_until(lambda: value("grpo_generator_rollouts") == 2, 60)
        assert value("grpo_generator_claimed_tickets_total") == 2
        first = next(iter(loop.tickets.held.values()))
        first.submitting = True  # as if it had just started to submit, which Redis rejects
        await service.store.client.delete(service.store.keys.claims)
        await wait_until(lambda: value("grpo_generator_lost_leases_total") == 1, 60)
        await wait_until(lambda: value("grpo_generator_refused_submits_total") == 1, 60)
        service.stop()
        await running


async def test_an_abandoned_ticket_is_counted(tmp_path: Path, server: RedisServer) -> None:
    async with generator(tmp_path, server) as (service, loop, _):
        await issue(service.store, ticket(0, answer="break"))
        running = asyncio.create_task(service.run(loop.work))
        await wait_until(lambda: service.registry.get_sample_value("grpo_generator_given_up_tickets_total") == 1, 60)
        service.stop()
        await running
        assert [letter.ticket for letter in await service.store.dead_letters.page()] == ["0-0"]


async def test_a_failed_sync_phase_is_counted(store: Store, server: RedisServer, tmp_path: Path) -> None:
    service = pod("generator", store, server, tmp_path)
    engine: Any = object()
    follower = WeightFollower(service, engine, GeneratorMetrics(service.registry))
    await follower._take_part(Round(7, 1, "pause", {service.status.member: 1}, 2, "gloo", "", 0, 1, 1))
    assert service.registry.get_sample_value("grpo_generator_sync_failures_total") == 1


def test_a_generators_gauges_are_shown() -> None:
    registry = CollectorRegistry()
    metrics = GeneratorMetrics(registry)
    metrics.show_engine(Gauges(3, 2, 1, 0.5, 40), Gauges(0, 0, 0, 0.0, 10))
    metrics.show_versions(1, 3)
    metrics.show_verifiers(PoolCounts(groups=3, restarts=2, busy_s=1.5), PoolCounts(restarts=1, busy_s=0.5))
    value = registry.get_sample_value
    assert [value("grpo_generator_requests", {"state": state}) for state in ("running", "waiting")] == [3, 2]
    assert [value(f"grpo_generator_{name}") for name in ("kv_usage_ratio", "sampled_tokens_total", "versions_behind")] == [
        0.5,
        30,
        2,
    ]
    assert [value(f"grpo_generator_verifier_{name}_total") for name in ("restarts", "busy_seconds")] == [1, 1.0]


async def test_the_census_shows_pauses_dead_letters_and_the_end(
    store: Store, server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_gauges, "POLL_S", 0.01)
    service = pod("dataprep", store, server, tmp_path)
    value = service.registry.get_sample_value
    looking = asyncio.create_task(show_run(service, RunMetrics(service.registry), Loop("run_gauges", None, 1.0)))  # type: ignore[arg-type]
    await store.run.create("config", "data", 4, 8)
    await issue(store, ticket(0), ticket(1))
    await store.steps.publish(await store.run.attach_trainer(), 0)
    await store.fleet.beat(pod("environment", store, server, tmp_path).status, 60)
    await wait_until(lambda: value("grpo_run_tickets", {"place": "queued"}) == 2, 60)
    assert value("grpo_run_slots") == 8
    await wait_until(lambda: value("grpo_run_pods", {"kind": "environment"}) == 1, 60)
    await wait_until(lambda: value("grpo_run_oldest_ticket_seconds") or 0 > 0, 60)
    sender = (await store.run.state()).trainer_fence  # type: ignore[union-attr]
    _, (claim,) = await store.tickets.claim("generator-0", 0, sender, 60, 1)
    await wait_until(lambda: value("grpo_run_tickets", {"place": "claimed"}) == 1, 60)
    await store.tickets.fail("generator-0", claim, "it breaks", 1)
    await store.client.hincrby(store.keys.ledger, "doubled", 1)
    await store.run.pause("trainer", "maintenance")
    await store.run.scale_generators(3, "test")
    await store.run.stop("test")
    await wait_until(lambda: value("grpo_run_ended") == 1, 60)
    await wait_until(lambda: value("grpo_run_doubled_tickets") == 1, 60)
    assert value("grpo_run_dead_letters") == value("grpo_run_outcome_tickets", {"outcome": "failed"}) == 1
    assert value("grpo_run_paused", {"role": "trainer"}) == 1
    assert value("grpo_run_wanted_generators") == 3
    await end_tasks([looking])  # it polls nearly all the time, and redis-py may lose a cancellation


async def test_no_number_of_generators_is_desired_that_nothing_follows(
    store: Store, server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GrpoTooFewGenerators would compare the fleet with a request from before the release got an autoscaler."""
    monkeypatch.setattr(run_gauges, "POLL_S", 0.01)
    service = pod("dataprep", store, server, tmp_path, "fleet.scaling=cluster")
    value = service.registry.get_sample_value
    await store.run.create("config", "data", 4, 8)
    await store.run.scale_generators(8, "before")
    looking = asyncio.create_task(show_run(service, RunMetrics(service.registry), Loop("run_gauges", None, 1.0)))  # type: ignore[arg-type]
    await wait_until(lambda: value("grpo_run_slots") == 8 and value("grpo_run_wanted_generators") != 0, 60)
    assert math.isnan(value("grpo_run_wanted_generators") or 0)
    await end_tasks([looking])


async def test_totals_are_not_shown_as_0_before_they_are_counted(
    store: Store, server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GrpoDeadLetters would take the first count of a new pod for a rise; during a restore nothing is counted."""
    monkeypatch.setattr(run_gauges, "POLL_S", 0.01)
    service = pod("dataprep", store, server, tmp_path)
    value = service.registry.get_sample_value
    shown = RunMetrics(service.registry)

    def totals() -> tuple[float | None, float | None]:
        return value("grpo_run_outcome_tickets", {"outcome": "failed"}), value("grpo_run_dead_letters")

    assert all(total is not None and math.isnan(total) for total in totals())
    await store.run.create("config", "data", 4, 8)
    await store.client.hset(store.keys.run, "restoring", "1")
    looking = asyncio.create_task(show_run(service, shown, Loop("run_gauges", None, 1.0)))  # type: ignore[arg-type]
    await wait_until(lambda: value("grpo_redis_clients") or 0 > 0, 60)
    assert all(total is not None and math.isnan(total) for total in totals())
    await store.client.hdel(store.keys.run, "restoring")
    await wait_until(lambda: totals() == (0, 0), 60)
    await end_tasks([looking])


def test_phases_last_until_the_next_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr("services.runtime.metrics.time.monotonic", lambda: now)
    noted: list[tuple[str, float]] = []
    clock = PhaseClock({"a": lambda s: noted.append(("a", s)), "b": lambda s: noted.append(("b", s))})
    for at, phase in ((11.0, "a"), (13.0, "a"), (14.0, "b"), (17.0, ""), (18.0, "unknown"), (20.0, "b"), (21.0, "")):
        now = at
        clock.enter(phase)
    assert noted == [("a", 2.0), ("a", 1.0), ("b", 3.0), ("b", 1.0)]


def test_the_trainers_phases_are_timed_by_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("services.runtime.metrics.time.monotonic", lambda: now)
    registry = CollectorRegistry()
    clock = TrainerMetrics(registry).phase_clock()
    for phase in ("training", "syncing", "saving", "waiting for data"):
        clock.enter(phase)
        now += 2.0
    value = registry.get_sample_value
    assert value("grpo_trainer_phase_seconds_total", {"phase": "syncing"}) == 2.0
    assert (value("grpo_trainer_checkpoint_seconds_count"), value("grpo_trainer_checkpoint_seconds_sum")) == (1, 2.0)
