"""Assembles an environment pod and runs its life: load the environments' code, work, leave."""

from __future__ import annotations

import asyncio
import contextlib

from services.chat.format import ChatFormat
from services.chat.tokenizers import tokenizer_folder
from services.environment.endpoints import Door
from services.environment.generators import GeneratorFleet
from services.environment.group import GroupRunner
from services.environment.loop import EnvironmentLoop
from services.environment.metrics import EnvironmentMetrics
from services.environment.programs.pool import ProgramPool
from services.environment.programs.process import ProgramUnusable
from services.http.entry import load_pod
from services.runtime.loops import Fatal, Loop
from services.runtime.service import LOOP_LIMIT_S, Service
from services.verifiers.base import VerifierFailure
from services.verifiers.scoring import Scoring


class EnvironmentPod:
    """An environment pod with all its parts. `run` runs it."""

    def __init__(self, service: Service) -> None:
        config = service.config
        self.service, self.fleet = service, GeneratorFleet(service)
        self.verifiers = Scoring(config, config.all_sources)
        self.pools = {each.name: ProgramPool(each) for each in config.environments}
        chat = ChatFormat(tokenizer_folder(config.model.path), config.data)
        metrics = EnvironmentMetrics(service.registry)
        metrics.running.set_function(lambda: sum(pod.rollouts for pool in self.pools.values() for pod in pool.processes))
        self.door = Door(config.model.path)
        groups = GroupRunner(service, chat, self.fleet, self.pools, self.verifiers, metrics, self.door)
        self.loop = EnvironmentLoop(service, self.fleet, groups, self.verifiers, metrics)
        self._loaded = asyncio.Event()
        service.ready = self.loop.why_idle

    async def run(self) -> None:
        """Run the pod from start to end."""
        add, config = self.service.add_loop, self.service.config
        add("generators", self.fleet.follow)
        add("door", self._serve, float("inf"))
        add("leases", self.loop.tickets.renew, LOOP_LIMIT_S + config.fleet.lease_s)
        async with contextlib.AsyncExitStack() as stack:  # which closes each part even if closing another is cancelled
            for part in (self.fleet, self.verifiers, *self.pools.values(), self.loop.tickets):  # the last one first
                stack.push_async_callback(part.close)
            await self.service.run(self._work)

    async def _serve(self, _: Loop) -> None:
        await self.door.serve()

    async def _work(self, loop: Loop) -> None:
        """Load, then run rollouts until stopped.

        After a failure of this loop, e.g. in a long outage of Redis, what is loaded is kept.
        """
        if not self._loaded.is_set():
            if not await load_pod(self.service, loop, self._load):
                return
            self.service.say(phase="ready")
            self._loaded.set()
        loop.limit_s = LOOP_LIMIT_S + self.service.config.generator.drain_s
        await self.loop.work(loop)

    async def _load(self) -> None:
        try:
            await self.verifiers.start()
            await asyncio.gather(*(pool.start() for pool in self.pools.values()))
        except VerifierFailure as error:
            raise Fatal(f"verifiers cannot start: {error}") from None
        except ProgramUnusable as error:
            raise Fatal(str(error)) from None
