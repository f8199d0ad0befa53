"""Weight-sync rounds for tests: the trainer's side, and scripted generators that follow and, on request, evaluate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from services.config import RunConfig
from services.console.run.redis_server import RedisServer
from services.generator.evaluation import EvaluationDuty
from services.generator.loop import GeneratorLoop
from services.generator.metrics import GeneratorMetrics
from services.protocol.messages import PodStatus, Round
from services.runtime.loops import end_tasks
from services.runtime.notifications import Notifications
from services.runtime.portal import Portal
from services.runtime.service import Service
from services.store import Store
from services.verifiers.base import Job, Scores
from services.weights.buckets import BUCKET_BYTES
from services.weights.rounds.leader import Send, SyncReport, SyncRounds
from services.weights.rounds.member import WeightFollower
from services.weights.rounds.metrics import RoundMetrics
from services.weights.transport import Sender
from tests.support.harness import PlainTokenizer, small_config
from tests.support.scripted import ScriptedEngine
from tests.support.senders import sender_of

LIMITS = ("sync.deadline_s=20", "sync.host=127.0.0.1", "sync.backend=gloo")


class AnyVerifier:
    """Scores the first completion of a group 1 and the others 0."""

    waiting = ""

    async def score(self, job: Job) -> Scores:
        return Scores({"exact": [1.0] + [0.0] * (len(job.completions) - 1)}, [])


class Pinned:
    """A member's duty to evaluate, or, for a test, a version that it is kept on without a round."""

    def __init__(self, duty: EvaluationDuty) -> None:
        self._duty = duty
        self.forced: int | None = None

    @property
    def version(self) -> int | None:
        return self._duty.version if self.forced is None else self.forced

    async def offer(self) -> None:
        await self._duty.offer()


@dataclass
class World:
    """The trainer's side, and members that follow its rounds on the portal's loop."""

    config: RunConfig
    portal: Portal
    store: Store
    fence: int
    sender: Sender
    rounds: SyncRounds
    model: torch.nn.Module
    send: Send
    engines: dict[str, ScriptedEngine] = field(default_factory=dict)
    loops: dict[str, GeneratorLoop] = field(default_factory=dict)
    pinned: dict[str, Pinned] = field(default_factory=dict)
    tasks: dict[str, list[asyncio.Task[None]]] = field(default_factory=dict)
    metrics: dict[str, GeneratorMetrics] = field(default_factory=dict)
    gathered: set[str] = field(default_factory=set)  # all members of any round
    watchers: list[Callable[[Round], None]] = field(default_factory=list)  # called with every phase that was opened

    def member(self, name: str, engine: ScriptedEngine | None = None, follows: bool = True) -> str:
        """Add a generator. One that does not follow never responds, like a stopped process with a fresh heartbeat."""
        self.engines[name] = engine or ScriptedEngine()

        async def join() -> str:
            status = PodStatus("generator", name, "boot", "here", 1, "", "unsynced", -1, 1, {})
            service = Service("generator", self.config, self.store, status)
            engine = self.engines[name]
            await engine.start(self.config)
            await self.store.fleet.beat(status, 60)
            if follows:
                metrics = self.metrics[name] = GeneratorMetrics(service.registry)
                work = self.loops[name] = GeneratorLoop(service, engine, PlainTokenizer(), cast("Any", AnyVerifier()), metrics)
                pinned = self.pinned[name] = Pinned(work.evaluation)
                follower = WeightFollower(service, engine, metrics, pinned)
                bodies = (
                    service._listen, service._heartbeat, service.view.follow, follower.follow, work.work, work.tickets.renew,
                )  # fmt: skip
                loops = [service.add_loop(f"{name}-{i}", body) for i, body in enumerate(bodies)]
                self.tasks[name] = [asyncio.create_task(loop.supervise()) for loop in loops]
            return status.member

        return self.portal.call(join())

    def kill(self, name: str) -> None:
        """Kill a member as if its machine were lost: it sends no message and hands nothing back."""

        async def end() -> None:
            await end_tasks(self.tasks[name])
            await self.cancel_tickets(name)

        self.portal.call(end())

    async def cancel_tickets(self, name: str) -> None:
        """End all work of a member without handing anything back."""
        tickets = self.loops[name].tickets
        for held in list(tickets.held.values()):
            await tickets.cancel(held)

    def hold(self, name: str, version: int) -> None:
        """Keep a member evaluating a version until `release`, without a round."""
        self.pinned[name].forced = version

    def release(self, name: str) -> None:
        """Return a member to training."""
        self.pinned[name].forced = None

    def train(self, version: int, ending: Callable[[], bool] = lambda: False) -> SyncReport:
        """Sync `version` to the fleet and publish it, as after a step. `ending` is called whenever no generator has taken it."""
        self.commit(version)
        report = self.rounds.run(version, ending)
        self.portal.call(self.store.steps.publish(self.fence, version))
        return report

    def commit(self, version: int) -> None:
        """Commit the step that produces `version`."""

        async def step() -> None:
            if version > 0:
                step = version - 1
                await self.store.client.hset(self.store.keys.run, mapping={"prepared_step": step, "committed_step": step})
                await self.store.client.hset(self.store.keys.step(step), mapping={"fresh": "", "departed": ""})

        self.portal.call(step())

    def versions(self) -> dict[str, int]:
        return {name: engine.version for name, engine in self.engines.items()}


@contextmanager
def open_world(
    folder: Path,
    server: RedisServer,
    *overrides: str,
    model: torch.nn.Module | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    metrics: RoundMetrics | None = None,
) -> Iterator[World]:
    """Yield the trainer's side of a run that has no members yet, by default with a small model."""
    config = small_config(folder, server, *LIMITS, *overrides)
    portal = Portal()
    store = portal.call(Store.connect(server.url, "rounds", server.password))
    portal.call(store.run.create("config", "data", config.run.steps, config.slots))
    fence = portal.call(store.run.attach_trainer())
    notifications = Notifications()
    model = model or torch.nn.Linear(8, 4)
    sender = sender_of(config, model, bucket_bytes=bucket_bytes)
    listening = portal.start(notifications.listen(store))
    service: Any = SimpleNamespace(config=config, store=store, notifications=notifications)
    rounds = SyncRounds(service, portal, fence, sender, lambda *given: world.send(*given), lambda: None, metrics)
    world = World(config, portal, store, fence, sender, rounds, model, sender.send)
    opening = store.fleet.set_round

    async def opened(fence: int, current: Round) -> None:
        await opening(fence, current)
        world.gathered.update(current.members)
        for watcher in world.watchers:
            await asyncio.to_thread(watcher, current)  # which may call the portal

    store.fleet.set_round = opened
    try:
        yield world
    finally:

        async def end() -> None:
            for name in world.tasks:
                await end_tasks(world.tasks[name])
            for name in world.loops:
                await world.cancel_tickets(name)
            listening.cancel()
            await asyncio.sleep(0)
            await store.restores.delete_run()
            await store.close()

        sender.close()
        portal.call(end())
        portal.close()
