"""The environment pod's main loop: claim tickets, run the rollouts of each, score and submit the group.

Guarantees: those of a holder of tickets (services/rollouts/holding.py). A rollout that fails starts again by itself; the others
of its group are kept. What fails for good leaves its group, and is never a reward.
Waits for: tickets, generators, the end of a pause. Unblocked by: dataprep (`tickets`), the trainer (`version`), operators
(`control`), its own finished groups (`room`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import structlog

from services.config.environments import EnvironmentConfig
from services.environment.agent import Door, run_agent
from services.environment.chat.format import ChatFormat
from services.environment.conversation import converse, restorable
from services.environment.generators import GeneratorFleet
from services.environment.metrics import EnvironmentMetrics
from services.environment.programs.pool import ProgramFailed, ProgramPool, ProgramProcess
from services.environment.records import Record
from services.environment.rollout import FinishedRollout, LeaseLost, LiveRollout, RolloutPlace, records_of
from services.protocol.errors import StoreError
from services.protocol.messages import Row, Ticket
from services.rollouts.generated import GenerationFailed, RolloutFailed
from services.rollouts.holding import MAX_EXPIRIES, HeldTicket, TicketHolder
from services.rollouts.records import make_header, pack_payload
from services.runtime.loops import Loop
from services.runtime.service import Service
from services.store import Claim
from services.store.calls.tickets import TurnPlace
from services.verifiers.base import Job, Scores, combine, solved
from services.verifiers.scoring import Scoring

log = structlog.get_logger()

IDLE_S = 1.0  # the longest delay that a missed notification can cause
TURNS_TTL_S = 7 * 24 * 3600
"""Seconds after which the turns of a ticket that nobody continues expire; whatever ends a ticket deletes them."""
PAYLOAD_TTL_S = 3600
FILL_TIMES = 2  # as many rollouts as the generators run at a time, this many times over: the others wait for their environment


@dataclass
class HeldGroup(HeldTicket):
    """A ticket whose rollouts run."""

    finished: dict[int, FinishedRollout] = field(default_factory=dict[int, FinishedRollout])  # by sample
    failed: dict[int, str] = field(default_factory=dict[int, str])  # by sample: why it failed for good


class EnvironmentLoop(TicketHolder[HeldGroup]):
    """Keeps the generators busy with the rollouts of claimed tickets."""

    def __init__(
        self, service: Service, chat: ChatFormat, fleet: GeneratorFleet, pools: Mapping[str, ProgramPool], verifiers: Scoring,
        metrics: EnvironmentMetrics, door: Door,
    ) -> None:  # fmt: skip
        """`pools` are the environments' processes, by name."""
        super().__init__(service, metrics)
        self._chat, self._fleet, self._pools, self._verifiers, self._metrics = chat, fleet, pools, verifiers, metrics
        self._door = door
        self._scan, self._adopt = "0-0", True
        metrics.held.set_function(lambda: len(self.rollouts))
        metrics.running.set_function(lambda: sum(pod.rollouts for pool in pools.values() for pod in pool.processes))

    def why_idle(self) -> str:
        """Return why this pod would start no rollout now, or ""."""
        state = self.service.view.state
        if state is None:
            return "the run does not exist yet"
        if self._verifiers.waiting:
            return self._verifiers.waiting
        if state.published_version < 0:
            return "waiting for the trainer's first weights"
        return "" if self._fleet.seats else "no generator is ready"

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
        return max(1, FILL_TIMES * self._fleet.seats // size) - len(self.rollouts)

    async def _claim(self) -> int:
        state, room = self.service.view.state, self._room()
        if state is None or self.why_idle() or room <= 0:
            return 0
        self._scan, claims = await self.store.tickets.claim(
            self.name, state.published_version, state.published_by, self.config.generator.lease_s, room, self._scan, self._adopt,
            MAX_EXPIRIES, rollouts=True,
        )  # fmt: skip
        self._adopt = False
        self._metrics.claimed.inc(len(claims))
        for claim in claims:
            await self.start(claim)
        return len(claims)

    def hold(self, claim: Claim, ticket: Ticket) -> HeldGroup:
        """Return the record of a ticket that was just claimed."""
        return HeldGroup(claim, ticket)

    def unfit(self, ticket: Ticket) -> str:
        """Return why the rollouts of a ticket cannot be run, or ""."""
        environment = self.config.environment_of(ticket.source)
        if environment is None or environment.name not in self._pools:
            return f"the prompt source {ticket.source!r} has no environment"
        try:
            msgspec.json.decode(ticket.row, type=Row)
        except msgspec.DecodeError as error:
            return f"the ticket carries no row: {error}"
        return ""

    async def report(self, claim: Claim, reason: str, max_attempts: int) -> bool:
        """Hand a ticket back, or move it to the dead letters after too many failures."""
        return await self.store.tickets.fail(self.name, claim, reason, max_attempts)

    async def extend(self, claims: Sequence[Claim]) -> set[str]:
        """Renew leases and return the entries that are lost."""
        return await self.store.tickets.renew(self.name, claims)

    async def submit(self, rollout: HeldGroup) -> bool:
        """Run the rollouts of a ticket, score them and submit the group."""
        ticket, environment = rollout.ticket, self.config.environment_of(rollout.ticket.source)
        assert environment is not None, "the ticket was found fit"
        found = await self.store.tickets.turns(ticket.id)
        tasks = [
            asyncio.ensure_future(self._rollout(rollout, environment, sample, *found.get(sample, (0, []))))
            for sample in range(ticket.group_size)
        ]
        try:
            await asyncio.gather(*tasks)
        except LeaseLost:
            return False
        finally:
            for task in tasks:  # if one has failed, the others are still running
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        least = self.config.sampling.min_group_size or ticket.group_size
        if len(rollout.finished) < least:
            reasons = "; ".join(f"rollout {sample}: {why}" for sample, why in sorted(rollout.failed.items()))
            raise RolloutFailed(
                f"{len(rollout.finished)} of {ticket.group_size} rollouts finished, fewer than {least}: {reasons}"
            )
        return await self._submit(rollout, environment, [done for _, done in sorted(rollout.finished.items())])

    async def _submit(self, rollout: HeldGroup, environment: EnvironmentConfig, done: list[FinishedRollout]) -> bool:
        ticket, generated = rollout.ticket, time.monotonic()
        found = await self._score(ticket, environment, done)
        rewards = self._rewards(environment, found, len(done))
        scored = time.monotonic()
        payload = pack_payload(ticket, [each.segments for each in done], found.notes)
        header = make_header(
            ticket, [each.segments for each in done], found.scores, rewards,
            solved(found.scores, self.config.thresholds(ticket.source)),
            payload=rollout.claim.payload, payload_bytes=len(payload), generator=self.name,
            generate_s=generated - rollout.started, score_s=scored - generated, truncated=[each.truncated for each in done],
            turns=[each.turns for each in done], tool_s=[each.environment_s for each in done],
        )  # fmt: skip
        self._metrics.rollout_s.observe(header.generate_s)
        self._metrics.score_s.observe(header.score_s)
        for each in done:
            self._metrics.observe(each)
        return await self.submit_with_retry(
            rollout, lambda: self.store.tickets.submit(self.name, rollout.claim, header, payload, PAYLOAD_TTL_S)
        )

    async def _score(self, ticket: Ticket, environment: EnvironmentConfig, done: list[FinishedRollout]) -> Scores:
        """Return the environment's scores, and those of the verifiers of the ticket's source."""
        scores: dict[str, list[float]] = {}
        notes: list[str] = []
        if any(verifier.scores(ticket.source) for verifier in self.config.verifiers):
            finish = ["length" if each.truncated else "stop" for each in done]
            job = Job(ticket.source, [each.answer for each in done], ticket.answer, ticket.row, finish)
            found = await self._verifiers.score(job)
            scores, notes = dict(found.scores), found.notes
        own = [each.scores for each in done]
        for name in sorted({name for each in own if each for name in each}):
            key = environment.name if name == "score" else f"{environment.name}.{name}"
            scores[key] = [(each or {}).get(name, 0.0) for each in own]
        return Scores(scores, notes)

    def _rewards(self, environment: EnvironmentConfig, found: Scores, n: int) -> list[float]:
        """Return the rewards [n]: what the environment gives, and the weighted sum of the verifiers' scores."""
        own = found.scores.get(environment.name, [0.0] * n)
        others = combine(found.scores, self.config.verifiers) or [0.0] * n
        return [mine + other for mine, other in zip(own, others, strict=True)]

    async def _rollout(
        self, group: HeldGroup, environment: EnvironmentConfig, sample: int, restarts: int, data: list[bytes]
    ) -> None:
        """Run one rollout to its end, starting it again when it fails."""
        row, records = msgspec.json.decode(group.ticket.row, type=Row), records_of(data)
        begun = bool(data)
        for attempt in range(self.config.generator.max_attempts):
            live = self._live(group, environment, sample, restarts, records, row)
            if begun and restorable(live):
                self._metrics.continued.inc()
            elif begun:
                restarts += 1
                if not await self.store.tickets.restart_rollout(self.name, group.claim, sample, restarts, TURNS_TTL_S):
                    raise LeaseLost
                self._metrics.restarts.inc()
                live = self._live(group, environment, sample, restarts, [], row)
            begun = True
            lost = False  # whether its process died, perhaps because of another rollout
            try:
                async with self._pools[environment.name].process() as process:
                    try:
                        group.finished[sample] = await self._drive(live, process, environment, row)
                    finally:
                        lost = not process.alive
                return
            except (ProgramFailed, GenerationFailed, ValueError, TypeError) as error:  # the latter two: of what it replied
                log.warning("rollout failed", ticket=group.ticket.id, sample=sample, attempt=attempt, error=str(error))
                group.failed[sample], records = str(error), list(live.records) if lost else []
            finally:
                self._fleet.forget(live.place.name)
        self._metrics.left_out.inc()

    async def _drive(
        self, live: LiveRollout, process: ProgramProcess, environment: EnvironmentConfig, row: Row
    ) -> FinishedRollout:
        if environment.kind == "agent":
            return await run_agent(live, process, self._door, environment.timeout_s)
        return await converse(live, process, row.messages)

    def _live(
        self, group: HeldGroup, environment: EnvironmentConfig, sample: int, restarts: int, records: list[Record], row: Row
    ) -> LiveRollout:
        ticket, claim = group.ticket, group.claim
        place = RolloutPlace(ticket, sample, restarts, f"{claim.payload}.{sample}.{restarts}")

        async def commit(at: int, record: bytes) -> bool:
            return await self.store.tickets.commit_turn(self.name, claim, TurnPlace(sample, restarts, at), record, TURNS_TTL_S)

        return LiveRollout(
            place, self.config, self._chat, row.messages, self._fleet, list(records), environment.max_turns, commit
        )

    async def drain(self) -> None:
        """Finish what can be finished within `generator.drain_s`; hand back the rest, whose turns are committed."""
        self.service.say(phase="draining")
        tasks = [rollout.task for rollout in self.rollouts.values() if rollout.task]
        if tasks and not self.service.view.ended:
            await asyncio.wait(tasks, timeout=self.config.generator.drain_s)
        left = list(self.rollouts.values())
        try:
            for rollout in left:
                await self.cancel(rollout)
                await self.store.tickets.release(self.name, rollout.claim)
        except StoreError as error:  # without Redis the pod must still exit; its leases expire
            log.warning("some tickets were not handed back", error=str(error))
        log.info("drained", handed_back=len(left))
