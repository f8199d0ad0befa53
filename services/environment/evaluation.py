"""Runs the rollouts of evaluation rounds: those tickets of a round whose prompt source names an environment.

Guarantees: every token of a result was sampled by the round's version; otherwise the ticket fails. Turns are not committed: after
the loss of its pod a ticket of a round starts again, in new environments.
Waits for: a generator that is kept on the round's version, tickets of that round. Unblocked by: the fleet's heartbeats, dataprep
and other pods (`evaluation`), its own finished tickets (`evaluated`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import structlog

from services.environment.group import GroupRunner, HeldGroup
from services.environment.metrics import EnvironmentMetrics
from services.environment.rollout import Manner
from services.protocol.errors import StoreError
from services.protocol.messages import Ticket
from services.rollouts.generated import GenerationFailed
from services.rollouts.holding import MAX_EXPIRIES, TicketHolder
from services.rollouts.records import mixed
from services.runtime.loops import Loop
from services.runtime.service import Service
from services.store import Claim

log = structlog.get_logger()

IDLE_S = 1.0  # the longest delay that a missed notification can cause


class UncommittedTurns:
    """Keeps no turns: rollouts of evaluations are not continued elsewhere."""

    async def commit(self, sample: int, restarts: int, at: int, record: bytes) -> bool:
        """Do nothing."""
        return True

    async def restart(self, sample: int, restarts: int) -> bool:
        """Do nothing."""
        return True


class EvaluationLoop(TicketHolder[HeldGroup]):
    """Completes the environments' tickets of an open round while generators evaluate."""

    room = "evaluated"

    def __init__(self, service: Service, groups: GroupRunner, metrics: EnvironmentMetrics) -> None:
        super().__init__(service, metrics)
        self._groups, self._member = groups, service.status.member
        self._closed = False
        self._turns = asyncio.Lock()  # keeps a claim from racing with handing everything back

    async def work(self, loop: Loop) -> None:
        """Claim and complete tickets until cancelled."""
        while True:
            loop.progress()
            async with self._turns:
                for version in self._groups.evaluating if not self._closed else ():
                    await self._claim(version)
            await self.notifications.wait("evaluation", "fleet", "control", self.room, timeout=IDLE_S)

    async def _claim(self, version: int) -> None:
        """Claim as many tickets as the generators that evaluate can run at a time."""
        room = max(1, self._groups.evaluation_seats // self.config.evaluation.samples) - len(self.rollouts)
        if room <= 0:
            return
        try:
            found = await self.store.evaluation.claim(
                self._member, version, self.config.generator.lease_s, room, MAX_EXPIRIES, rollouts=True
            )
        except StoreError as error:
            log.warning("no tickets of an evaluation could be claimed", error=str(error))
            return
        for claim in found.claims if found else ():
            await self.start(claim)

    def hold(self, claim: Claim, ticket: Ticket) -> HeldGroup:
        """Return the record of a ticket that was just claimed."""
        return HeldGroup(claim, ticket)

    def unfit(self, ticket: Ticket) -> str:
        """Return why the rollouts of a ticket cannot be run, or ""."""
        return self._groups.unfit(ticket)

    async def report(self, claim: Claim, reason: str, max_attempts: int) -> bool:
        """Hand a ticket back, or report that the round cannot be completed."""
        return await self.store.evaluation.fail(self._member, claim, reason, max_attempts)

    async def extend(self, claims: Sequence[Claim]) -> set[str]:
        """Renew leases and return the entries that are lost; a round that has ended loses all."""
        return await self.store.evaluation.renew(self._member, claims, self.config.generator.lease_s)

    async def submit(self, rollout: HeldGroup) -> bool:
        """Run the rollouts of a ticket, score them and submit the result. Its tokens are not sent."""
        ticket = rollout.ticket
        manner = Manner.evaluation(self.config, ticket.epoch)
        done = await self._groups.run(rollout, manner, UncommittedTurns(), {}, ticket.group_size)
        generated = time.monotonic()
        header = self._groups.header(rollout, await self._groups.score(ticket, done), self.name, generated)
        if fault := mixed(header, ticket.epoch):
            raise GenerationFailed(fault)
        return await self.submit_with_retry(rollout, lambda: self.store.evaluation.submit(self._member, rollout.claim, header))

    async def drain(self) -> None:
        """Hand everything back before the process ends: another pod runs it again."""
        self._closed = True
        async with self._turns:
            left = list(self.rollouts.values())
            for rollout in left:
                await self.cancel(rollout)
            if left:
                try:
                    await self.store.evaluation.resign(self._member, [rollout.claim for rollout in left])
                except StoreError as error:  # without Redis the pod must still exit; its leases expire
                    log.warning("some tickets of an evaluation were not handed back", error=str(error))
