"""The environment pod's main loop: claim tickets, run the rollouts of each, score and submit the group.

Guarantees: those of a holder of tickets (services/rollouts/holding.py) and of a group (group.py).
Waits for: tickets, generators, the end of a pause. Unblocked by: dataprep (`tickets`), the trainer (`version`), operators
(`control`), its own finished groups (`room`).
"""

from __future__ import annotations

import asyncio
import time

import structlog

from services.environment.group import GroupRunner, HeldGroup
from services.environment.metrics import EnvironmentMetrics
from services.environment.rollout import FinishedRollout, LeaseLost, Manner
from services.protocol.errors import RedisFull, StoreError
from services.protocol.messages import Header, Ticket
from services.rollouts.holding import MAX_EXPIRIES, TicketHolder
from services.rollouts.records import pack_payload
from services.runtime.loops import Loop
from services.runtime.service import Service
from services.store import Claim
from services.store.calls.tickets import Tickets, TurnPlace

log = structlog.get_logger()

IDLE_S = 1.0  # the longest delay that a missed notification can cause
TURNS_TTL_S = 7 * 24 * 3600
"""Seconds after which the turns of an abandoned ticket expire; the end of a ticket deletes them."""
PAYLOAD_TTL_S = 3600
COMMIT_AGAIN_S = 1.0
FILL_TIMES = 2  # rollouts, as a multiple of those that the generators run at a time: the others wait for their environment


class CommittedTurns:
    """Keeps the turns of a ticket in Redis, from where another pod continues them. On a full Redis, a turn waits."""

    def __init__(self, tickets: Tickets, name: str, claim: Claim) -> None:
        self._tickets, self._name, self._claim = tickets, name, claim

    async def commit(self, sample: int, restarts: int, at: int, record: bytes) -> bool:
        """Append a record of a rollout at a place. Returns False if another pod holds the ticket."""
        place, told = TurnPlace(sample, restarts, at), False
        while True:
            try:
                return await self._tickets.commit_turn(self._name, self._claim, place, record, TURNS_TTL_S)
            except RedisFull as error:
                if not told:
                    log.warning("a turn waits to be committed", error=str(error))
                told = True
                await asyncio.sleep(COMMIT_AGAIN_S)

    async def restart(self, sample: int, restarts: int) -> bool:
        """Forget a rollout's turns. Returns False if another pod holds the ticket."""
        return await self._tickets.restart_rollout(self._name, self._claim, sample, restarts, TURNS_TTL_S)


class EnvironmentLoop(TicketHolder[HeldGroup]):
    """Keeps the generators busy with the rollouts of claimed tickets."""

    def __init__(self, service: Service, groups: GroupRunner, metrics: EnvironmentMetrics) -> None:
        super().__init__(service, metrics)
        self._groups, self._metrics = groups, metrics
        self._scan = "0-0"
        self._adopt = True  # until the first tickets, since an earlier process of this pod may have held some
        metrics.held.set_function(lambda: len(self.rollouts))

    def why_idle(self) -> str:
        """Return why this pod would start no rollout now, or ""."""
        state = self.service.view.state
        if state is None:
            return "the run does not exist yet"
        if self._groups.waiting:
            return self._groups.waiting
        if state.published_version < 0:
            return "waiting for the trainer's first weights"
        return "" if self._groups.seats else "no generator is ready"

    async def work(self, loop: Loop) -> None:
        """Claim tickets and run their rollouts until stopped, then drain."""
        while not self.service.stopping.is_set():
            loop.progress()
            if not await self._claim():
                await self.notifications.wait("tickets", "version", "control", self.room, timeout=IDLE_S)
        await self.drain()

    def _room(self) -> int:
        """Return how many tickets to claim: as many as keep the generators busy while environments reply."""
        size = self.config.sampling.group_size
        return max(1, FILL_TIMES * self._groups.seats // size) - len(self.rollouts)

    async def _claim(self) -> int:
        state, room = self.service.view.state, self._room()
        if state is None or self.why_idle() or room <= 0:
            return 0
        self._scan, claims = await self.store.tickets.claim(
            self.name, state.published_version, state.published_by, self.config.generator.lease_s, room, self._scan, self._adopt,
            MAX_EXPIRIES, rollouts=True,
        )  # fmt: skip
        self._adopt = self._adopt and not claims  # a claim that is refused adopts nothing
        self._metrics.claimed.inc(len(claims))
        for claim in claims:
            await self.start(claim)
        return len(claims)

    def hold(self, claim: Claim, ticket: Ticket) -> HeldGroup:
        """Return the record of a ticket that was just claimed."""
        return HeldGroup(claim, ticket)

    def unfit(self, ticket: Ticket) -> str:
        """Return why the rollouts of a ticket cannot be run, or ""."""
        return self._groups.unfit(ticket)

    async def submit(self, rollout: HeldGroup) -> bool:
        """Run the rollouts of a ticket, score them and submit the group."""
        ticket, claim = rollout.ticket, rollout.claim
        turns = CommittedTurns(self.store.tickets, self.name, claim)
        minimum = self.config.sampling.min_group_size or ticket.group_size
        try:
            done = await self._groups.run(
                rollout, Manner.training(self.config), turns, await self.store.tickets.turns(ticket.id), minimum
            )
        except LeaseLost:
            return False
        header, payload = await self._finish(rollout, done)
        return await self.submit_with_retry(
            rollout, lambda: self.store.tickets.submit(self.name, claim, header, payload, PAYLOAD_TTL_S)
        )

    async def _finish(self, rollout: HeldGroup, done: list[FinishedRollout]) -> tuple[Header, bytes]:
        """Score a group and return its header and payload."""
        ticket, generated = rollout.ticket, time.monotonic()
        found = await self._groups.score(ticket, done)
        payload = pack_payload(ticket, [each.segments for each in done], found.scores.notes)
        header = self._groups.header(rollout, found, self.name, generated, len(payload))
        self._metrics.rollout_s.observe(header.generate_s)
        self._metrics.score_s.observe(header.score_s)
        for each in done:
            self._metrics.observe(each)
        return header, payload

    async def drain(self) -> None:
        """Finish what can be finished within `generator.drain_s`; hand back the rest, whose turns are committed."""
        self.service.say(phase="draining")
        tasks = [rollout.task for rollout in self.rollouts.values() if rollout.task]
        if tasks and not self.service.view.ended:
            await asyncio.wait(tasks, timeout=self.config.generator.drain_s)
        left = list(self.rollouts.values())
        for rollout in left:
            await self.cancel(rollout)
        try:
            for rollout in left:
                await self.store.tickets.release(self.name, rollout.claim)
        except StoreError as error:  # without Redis the pod must still exit; its leases expire
            log.warning("some tickets were not handed back", error=str(error))
        log.info("drained", handed_back=len(left))
