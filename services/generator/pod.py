"""Assembles a generator pod and runs its life: load, work, leave.

Guarantees: no loop that uses the engine begins before it is loaded; engine and verifiers are always closed.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from services.config import RunConfig
from services.config.model_files import check_path, unusable
from services.generator.api import add_routes
from services.generator.engines.base import make_engine
from services.generator.loop import PARTIAL_EVERY_S, GeneratorLoop
from services.generator.metrics import GeneratorMetrics, VllmMetrics
from services.http.entry import load_pod
from services.runtime.loops import Fatal, Loop, after
from services.runtime.service import LOOP_LIMIT_S, Service
from services.verifiers.base import VerifierFailure
from services.verifiers.scoring import Scoring
from services.weights.rounds.member import WeightFollower

ACTIVITY_S = 0.1  # between polls of what the pod is doing
STOPPED = ("pause", "paused", "transfer")
"""Phases of a weight-sync round in which the engine does not sample."""
ROUND_S = 3.0  # after the drain: limit of the wait for a weight-sync round that includes this pod


class GeneratorPod:
    """A generator with all its parts. `run` runs it."""

    def __init__(self, service: Service) -> None:
        config = service.config
        metrics = GeneratorMetrics(service.registry)
        service.registry.register(VllmMetrics())
        self.service, self.engine = service, make_engine(config)
        self.verifiers = Scoring(config, config.all_sources)
        self.loop = GeneratorLoop(service, self.engine, load_tokenizer(config), self.verifiers, metrics)
        self.weights = WeightFollower(service, self.engine, metrics, self.loop.evaluation)
        self._loaded, self._metrics = asyncio.Event(), metrics
        service.ready = self.loop.why_idle

    async def run(self) -> None:
        """Run the pod from start to end."""
        add_routes(self.service, self.loop)
        self._add_loops()
        async with contextlib.AsyncExitStack() as stack:  # which closes each part even if closing another is cancelled
            for part in (self.engine, self.verifiers, self.loop.tickets):  # the last one first
                stack.push_async_callback(part.close)
            await self.service.run(self._work)

    def _add_loops(self) -> None:
        """Add the loops that run alongside the main loop."""
        add, config = self.service.add_loop, self.service.config
        lease_limit_s = LOOP_LIMIT_S + config.fleet.lease_s
        add("weights", after(self._loaded, self.weights.follow))
        add("pause", after(self._loaded, lambda loop: self.loop.follow_pause(loop, lambda: self.weights.frozen)))
        add("leases", after(self._loaded, self.loop.tickets.renew), lease_limit_s)
        add("partials", after(self._loaded, self.loop.save_partials), LOOP_LIMIT_S + PARTIAL_EVERY_S)
        add("concurrency", after(self._loaded, self.loop.adapt))
        add("activity", self._note_activity)
        add("gauges", after(self._loaded, self.loop.show_gauges), LOOP_LIMIT_S + config.fleet.heartbeat_s)

    async def _work(self, loop: Loop) -> None:
        """Load, claim and complete tickets until stopped, then leave without delaying a sync round.

        After a failure of this loop, e.g. in a long outage of Redis, what is loaded is kept.
        """
        if not self._loaded.is_set():
            if not await load_pod(self.service, loop, self._load):
                return
            self.service.say(phase="unsynced", world=self.engine.world)
            self._loaded.set()
        loop.limit_s = LOOP_LIMIT_S + self.service.config.generator.drain_s
        await self.loop.work(loop)
        if not self.service.view.ended:
            await self.weights.released(ROUND_S)

    async def _note_activity(self, loop: Loop) -> None:
        """Keep the pod's activity up to date."""
        self.service.activity.devices = self.service.config.generator.tensor_parallel
        while True:
            self.service.activity.enter(self._activity())
            loop.progress()
            await asyncio.sleep(ACTIVITY_S)

    def _activity(self) -> str:
        """Return what the pod is doing now (services/runtime/activity.py)."""
        status, state = self.service.status, self.service.view.state
        if not self._loaded.is_set():
            return "loading"
        round_phase = self._metrics.rounds.phase
        sampling = bool(self.loop.generating or len(self.loop.serving)) or self.loop.evaluating
        if status.paused:
            return "paused"
        if round_phase in STOPPED or (round_phase and not sampling):
            return "syncing"
        if self.loop.evaluating:
            return "evaluating"
        if sampling:
            return "generating"
        if self.loop.busy:
            return "scoring"
        behind = self.engine.version < 0 or (state is not None and self.loop.weights != state.published)
        return "syncing" if behind else "idle"

    async def _load(self) -> None:
        try:
            await self.verifiers.start()
        except VerifierFailure as error:
            raise Fatal(f"verifiers cannot start: {error}") from None
        await self.engine.start(self.service.config)


def load_tokenizer(config: RunConfig) -> Any:
    """Return the tokenizer as transformers loads it. Raises `ConfigError`."""
    check_path(config.model.path)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(config.model.path)
    except (OSError, ValueError) as error:
        raise unusable(config.model.path, "has no usable tokenizer", error) from None
