"""The environment pod's main loop: claim tickets and have their rollouts run, scored and submitted.

Guarantees: those of a holder of tickets (services/runtime/holding.py) and of a group (group.py).
Waits for: tickets, generators that train or are kept on the version of an evaluation round, the end of a pause. Unblocked by:
dataprep (`tickets`, `evaluation`), the fleet's heartbeats (`fleet`), the trainer (`version`), operators (`control`), its own
finished groups (`ROOM`).
"""

from __future__ import annotations

import asyncio

import structlog

from services.environment.generators import GeneratorFleet
from services.environment.group import GroupRunner, HeldGroup
from services.environment.metrics import EnvironmentMetrics
from services.protocol.errors import StoreError
from services.runtime.holding import ROOM, TicketHolder
from services.runtime.loops import Loop
from services.runtime.service import Service
from services.verifiers.scoring import Scoring

log = structlog.get_logger()

IDLE_S = 1.0  # the longest delay that a missed notification can cause
FILL_TIMES = 2  # rollouts, as a multiple of those that the generators run at a time: the others wait for their environment


class EnvironmentLoop:
    """Keeps the generators busy with the rollouts of claimed tickets."""

    def __init__(
        self,
        service: Service,
        fleet: GeneratorFleet,
        groups: GroupRunner,
        verifiers: Scoring,
        metrics: EnvironmentMetrics,
    ) -> None:
        self._service, self._config, self._fleet, self._verifiers = service, service.config, fleet, verifiers
        self.tickets = TicketHolder[HeldGroup](service, metrics, groups, rollouts=True)
        metrics.held.set_function(lambda: len(self.tickets.of(evaluates=False)))

    def why_idle(self) -> str:
        """Return why this pod would start no rollout to train on now, or ""."""
        state = self._service.view.state
        if state is None:
            return "the run does not exist yet"
        if self._verifiers.waiting:
            return self._verifiers.waiting
        if state.published_version < 0:
            return "waiting for the trainer's first weights"
        return "" if self._fleet.seats else "no generator is ready"

    async def work(self, loop: Loop) -> None:
        """Claim tickets and run their rollouts until stopped, then drain."""
        while not self._service.stopping.is_set():
            loop.progress()
            claimed = await self.claim()
            for version in self._fleet.evaluating:
                claimed += await self._evaluate(version)
            if not claimed:
                topics = ("tickets", "evaluation", "fleet", "version", "control", ROOM)
                await self._service.notifications.wait(*topics, timeout=IDLE_S)
        await self.drain()

    async def claim(self) -> int:
        """Claim as many tickets as keep the generators busy while environments reply; return how many."""
        state, held = self._service.view.state, len(self.tickets.of(evaluates=False))
        room = max(1, FILL_TIMES * self._fleet.seats // self._config.sampling.group_size) - held
        if state is None or self.why_idle() or room <= 0:
            return 0
        return await self.tickets.claim(state.published, room)

    async def _evaluate(self, version: int) -> int:
        """Claim as many tickets of the round of `version` as the generators kept on it can run at a time; return how many."""
        held = len(self.tickets.of(evaluates=True))
        room = max(1, self._fleet.evaluation_seats // self._config.evaluation.samples) - held
        return await self.tickets.claim((0, version), room, evaluates=True) if room > 0 else 0

    async def drain(self) -> None:
        """Finish what can be finished within `generator.drain_s`; hand back the rest, whose turns are committed."""
        self._service.say(phase="draining")
        tasks = [held.task for held in self.tickets.held.values() if held.task]
        if tasks and not self._service.view.ended:
            await asyncio.wait(tasks, timeout=self._config.generator.drain_s)
        left = list(self.tickets.held.values())
        for held in left:
            await self.tickets.cancel(held)
        try:
            for held in left:
                await self.tickets.release(held)
        except StoreError as error:  # without Redis the pod must still exit; its leases expire
            log.warning("some tickets were not handed back", error=str(error))
        log.info("drained", handed_back=len(left))
