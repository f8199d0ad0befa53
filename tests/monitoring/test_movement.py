"""Every kind of problem changes its metric. Each test causes a problem with real components, as cheaply as possible."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from services.console.run.redis_server import RedisServer
from services.dataprep.replay import admission
from services.http.entry import open_service
from services.protocol.errors import Damaged, StoreError
from services.runtime.loops import Loop, end_tasks
from services.runtime.portal import Portal
from services.runtime.service import Service
from services.store import Store
from services.tracker.follower import Follower
from services.tracker.metrics import TrackerMetrics
from services.trainer.loop import TrainLoop
from services.trainer.metrics import TrainerMetrics
from tests.dataprep.test_loop import answer, configured, dataprep
from tests.monitoring.test_trouble import pod
from tests.support import flow
from tests.support.harness import small_config, wait_until
from tests.support.rounds_world import open_world
from tests.tracker import test_follower as tracker
from tests.weights.rounds.test_leader import Breaking

recorder = tracker.recorder
Value = Callable[..., float | None]
Seen = Callable[[Value], Awaitable[None]]


async def submit(store: Store, skip: int = 0, most: int = 100, **lies: Any) -> int:
    """Claim all tickets; submit up to `most` beyond the first `skip`, with different rewards except in rows below 20."""
    _, claims = await store.tickets.claim("stand-in", 0, await flow.trainer_fence(store), 60, 100)
    answered = sorted(claims, key=lambda claim: claim.ticket.seq if claim.ticket else 0)[skip : skip + most]
    for claim in answered:
        assert claim.ticket is not None
        header, payload = answer(claim.ticket, claim, 0)
        if claim.ticket.index < 20:
            header = msgspec.structs.replace(header, rewards=[0.0] * 4, scores={"exact": [0.0] * 4})
        assert await store.tickets.submit("stand-in", claim, msgspec.structs.replace(header, **lies), payload, 60)
    return len(answered)


async def steps_that_filters_leave_short_or_empty(folder: Path, server: RedisServer, seen: Seen) -> None:
    overrides = ("filters.zero_std=true", "data.curriculum=in_order", "run.steps=9")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "REPLACED_STEPS", 0)
        await _led(folder, server, seen, submit, *overrides)


async def a_header_that_lies(folder: Path, server: RedisServer, seen: Seen) -> None:
    await _led(folder, server, seen, partial(submit, rewards=[float("nan")] * 4))


async def a_late_ticket(folder: Path, server: RedisServer, seen: Seen) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "OVERTAKE_S", 0.0)
        await _led(folder, server, seen, partial(submit, skip=1))


async def groups_that_wait_too_long(folder: Path, server: RedisServer, seen: Seen) -> None:
    async def wait(store: Store) -> int:
        if await submit(store, most=3):
            await wait_until(lambda: _buffered(store, 3))
            await store.client.hset(store.keys.run, mapping={"prepared_step": 3, "committed_step": 3})
        return 0

    await _led(folder, server, seen, wait)


async def _buffered(store: Store, count: int) -> bool:
    return (await store.run.audit())["buffered"] == count


async def _led(
    folder: Path, server: RedisServer, seen: Seen, generate: Callable[[Store], Awaitable[int]],
    *overrides: str,
) -> None:  # fmt: skip
    """Run dataprep as the leader, with `generate` in place of generators."""
    async with dataprep(configured(folder, server, *overrides)) as (service, loop):
        await service.store.steps.publish(await service.store.run.attach_trainer(), 0)
        running = asyncio.create_task(service.run(loop.work))

        async def generating() -> None:
            while True:
                await generate(service.store)
                await asyncio.sleep(0.01)

        stand_in = asyncio.create_task(generating())
        try:
            await seen(lambda name, **labels: service.registry.get_sample_value(name, labels))
        finally:
            await end_tasks([stand_in])
            service.stop()
            await asyncio.gather(running, return_exceptions=True)
            await service.store.restores.delete_run()


DATAPREP: list[tuple[Any, dict[str, dict[str, str]]]] = [
    (
        steps_that_filters_leave_short_or_empty,
        {
            "grpo_dataprep_passed_over_steps_total": {},
            "grpo_dataprep_short_steps_total": {},
            "grpo_dataprep_settled_groups_total": {"action": "filtered:zero"},
        },
    ),
    (a_header_that_lies, {"grpo_dataprep_settled_groups_total": {"action": "failed"}}),
    (a_late_ticket, {"grpo_dataprep_overtaking_steps_total": {}}),
    (groups_that_wait_too_long, {"grpo_dataprep_stale_groups_total": {}}),
]


async def moved(metrics: dict[str, dict[str, str]], value: Value) -> None:
    """Wait until all of these metrics have changed; `wait_until` raises after a minute."""
    await wait_until(lambda: all(value(name, **labels) for name, labels in metrics.items()))


@pytest.mark.parametrize(("trouble", "metrics"), DATAPREP, ids=lambda given: getattr(given, "__name__", ""))
async def test_problems_of_data_change_metrics(
    trouble: Any, metrics: dict[str, dict[str, str]], tmp_path: Path, server: RedisServer
) -> None:
    found: list[float | None] = []

    async def seen(value: Value) -> None:
        await moved(metrics, value)
        found.extend(value(name, **labels) for name, labels in metrics.items())

    await trouble(tmp_path, server, seen)
    assert len(found) == len(metrics)
    assert all(found)


async def test_problems_of_any_pod_change_metrics(store: Store, tmp_path: Path, server: RedisServer) -> None:
    metrics = {"grpo_pod_loop_failures_total": {"loop": "trouble"}, "grpo_pod_spans_total": {"outcome": "dropped"}}
    service, failed = pod("tracker", store, server, tmp_path), asyncio.Event()

    async def fail_once(_: Loop) -> None:
        if not failed.is_set():
            failed.set()
            raise StoreError("trouble")
        await asyncio.Event().wait()

    service.tracing.counts["dropped"] += 3  # tests/runtime/test_tracing.py tests dropping
    running = asyncio.create_task(service.add_loop("trouble", fail_once).supervise())
    try:
        await moved(metrics, partial(_shown, service))
    finally:
        await end_tasks([running])
    assert _shown(service, "grpo_pod_loop_failures_total", loop="trouble") == 1
    assert _shown(service, "grpo_pod_spans_total", outcome="dropped") == 3


def _shown(service: Service, name: str, **labels: str) -> float | None:
    service.metrics.show(not service.ready(), service.loops, service.tracing.counts, service.activity)
    return service.registry.get_sample_value(name, labels)


async def test_problems_of_a_tracker_change_metrics(store: Store, tmp_path: Path, recorder: tracker.Recorder) -> None:
    metrics = {"grpo_tracker_failures_total": {"tracker": "wandb"}}
    recorder.failures, stopping, registry = 1, asyncio.Event(), CollectorRegistry()
    await store.monitor.record(tracker.record(0))
    config = small_config(tmp_path, None, "tracking.wandb=project")
    made = Follower("wandb", config, store, tmp_path / "tracking", stopping, TrackerMetrics(registry))
    following = asyncio.create_task(made.follow(Loop("wandb", made.follow, 60)))
    try:
        await moved(metrics, lambda name, **labels: registry.get_sample_value(name, labels))
    finally:
        stopping.set()
        await following
    assert registry.get_sample_value("grpo_tracker_failures_total", {"tracker": "wandb"}) == 1


def test_problems_of_a_sync_change_metrics(tmp_path: Path, server: RedisServer) -> None:
    registry = CollectorRegistry()
    with open_world(tmp_path, server, metrics=TrainerMetrics(registry)) as world:
        world.member("a")
        world.member("b", Breaking("join", True))
        world.train(0)
        assert registry.get_sample_value("grpo_trainer_sync_failures_total") == 1


class RankCommands:
    """Fake ranks that find a damaged payload and cannot write checkpoints."""

    def __init__(self) -> None:
        self.trained = 0

    def lead(self, name: str, _: int) -> object:
        if name == "save":
            return "disk full"
        self.trained += 1
        return Damaged({"0-1.7": "it is gone"}) if self.trained == 1 else ("plan", "trained")


def test_problems_of_a_trainer_change_metrics(tmp_path: Path, server: RedisServer) -> None:
    portal, commands = Portal(), RankCommands()
    stack = AsyncExitStack()
    try:
        opening = open_service("trainer", small_config(tmp_path, server), "trainer-0")
        service = portal.call(stack.enter_async_context(opening))
        store, value = service.store, service.registry.get_sample_value
        team = portal.call(flow.start(store))
        portal.call(flow.buffer(store, team, 2))
        portal.call(flow.prepare(store, team, 0, ["0-0", "0-1"]))
        worker: Any = SimpleNamespace(sender=None, checkpoints=SimpleNamespace(), policy=SimpleNamespace(peak_tflops=0.0))
        loop = TrainLoop(service, portal, worker, commands, TrainerMetrics(service.registry), lambda: None)  # type: ignore[arg-type]
        assert loop._train_whole(0) == ("plan", "trained")
        assert value("grpo_trainer_condemned_groups_total") == 1
        plan = portal.call(store.steps.plan(0))
        assert plan is not None
        assert plan.groups == ["0-0"]
        portal.call(store.steps.commit(loop.fence, 0))
        loop.saving.save(0, must=False)
        assert value("grpo_trainer_failed_checkpoints") == 1
        portal.call(store.restores.delete_run())
    finally:
        portal.call(stack.aclose())
        portal.close()
