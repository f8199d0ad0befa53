"""Runs and scores the rollouts of one ticket, whether they are trained on or evaluate a version.

Guarantees: a rollout that fails starts again by itself; the others of its group are kept. A rollout that fails for good leaves
its group, and an evaluation needs all of them; a failure is never a reward. A turn is kept in Redis before its tools run.
Waits for: the rollouts' environments and the policy; room in Redis for a turn. Unblocked by: their replies, or their time limits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import structlog

from services.chat.format import ChatFormat
from services.config.environments import EnvironmentConfig, drives_itself
from services.environment.agent import run_agent
from services.environment.conversation import converse, restorable
from services.environment.endpoints import Door
from services.environment.generators import GeneratorFleet
from services.environment.metrics import EnvironmentMetrics
from services.environment.programs.pool import ProgramPool
from services.environment.programs.process import ProcessLost, ProgramFailed, ProgramProcess, check_reward
from services.environment.records import Record, unpack_records
from services.environment.rollout import FinishedRollout, LeaseLost, LiveRollout, Manner, RolloutPlace
from services.groups.generated import GenerationFailed, RolloutFailed
from services.groups.records import make_header, pack_payload
from services.protocol.errors import RedisFull
from services.protocol.messages import Header, Row, Ticket
from services.runtime.holding import MAX_ATTEMPTS, HeldTicket
from services.runtime.service import Service
from services.store import Claim
from services.store.tickets import Tickets, TurnPlace
from services.verifiers.base import Job, combine, solved
from services.verifiers.scoring import Scoring

log = structlog.get_logger()

PAUSES_S = (0.0, 0.0, 5.0, 30.0)
"""Pauses before a rollout's attempts, by failures so far: its services may be unavailable for seconds, for example while a
server restarts."""
REPLY_FAULTS = (ValueError, TypeError, RecursionError)
"""What replies of a program or of the policy may raise here, such as a tool call with arguments that are nested too deeply."""
MAX_LOSSES = 16
"""How often a rollout may lose its process because of others before it is left out."""


TURNS_TTL_S = 7 * 24 * 3600
"""Seconds after which the turns of an abandoned ticket expire; the end of a ticket deletes them."""
COMMIT_AGAIN_S = 1.0


@dataclass
class HeldGroup(HeldTicket):
    """A ticket whose rollouts run."""

    finished: dict[int, FinishedRollout] = field(default_factory=dict[int, FinishedRollout])  # by sample
    failed: dict[int, str] = field(default_factory=dict[int, str])  # by sample: why it failed for good


class TurnLog:
    """Keeps the turns of a rollout in Redis, from where another pod continues them. On a full Redis, a turn waits."""

    def __init__(self, tickets: Tickets, consumer: str, claim: Claim, sample: int, restarts: int) -> None:
        """`restarts`: how often the rollout of this sample has started again."""
        self._tickets, self._consumer, self._claim, self._sample = tickets, consumer, claim, sample
        self.restarts = restarts

    async def commit(self, place: int, record: bytes) -> bool:
        """Append a record at a place. Returns False if another pod holds the ticket."""
        at, told = TurnPlace(self._sample, self.restarts, place), False
        while True:
            try:
                return await self._tickets.commit_turn(self._consumer, self._claim, at, record, TURNS_TTL_S)
            except RedisFull as error:
                if not told:
                    log.warning("a turn waits to be committed", error=str(error))
                told = True
                await asyncio.sleep(COMMIT_AGAIN_S)

    async def restart(self) -> None:
        """Forget the turns: the rollout starts again. Raises `LeaseLost`."""
        self.restarts += 1
        if not await self._tickets.restart_rollout(self._consumer, self._claim, self._sample, self.restarts, TURNS_TTL_S):
            raise LeaseLost


@dataclass
class Attempt:
    """The attempts at one rollout of a group."""

    group: HeldGroup
    sample: int
    environment: EnvironmentConfig
    turns: TurnLog
    records: list[Record]
    """What the next attempt continues from; empty: it starts afresh."""
    begun: bool
    """Whether the log may hold turns."""
    failures: int = 0
    losses: int = 0
    """How often it lost its process because of others."""

    @property
    def name(self) -> str:
        """Return a name that no other attempt has, in any pod."""
        return f"{self.group.claim.payload}.{self.sample}.{self.turns.restarts}"

    def failed(self, error: Exception) -> None:
        """Record why the attempt failed."""
        blameless = isinstance(error, ProcessLost) and not error.suspected
        self.losses, self.failures = self.losses + blameless, self.failures + (not blameless)
        self.group.failed[self.sample] = str(error)
        log.warning(
            "rollout failed",
            ticket=self.group.ticket.id,
            sample=self.sample,
            failures=self.failures,
            error=str(error),
            exc_info=isinstance(error, REPLY_FAULTS),
        )


class GroupRunner:
    """Runs the rollouts of tickets. Shared by all tickets of a pod."""

    def __init__(
        self,
        service: Service,
        chat: ChatFormat,
        fleet: GeneratorFleet,
        pools: Mapping[str, ProgramPool],
        verifiers: Scoring,
        metrics: EnvironmentMetrics,
        door: Door,
    ) -> None:
        """`pools` are the environments' processes, by name."""
        self._config, self._tickets, self._name = service.config, service.store.tickets, service.status.name
        self._chat, self._fleet, self._pools, self._tracing = chat, fleet, pools, service.tracing
        self._verifiers, self._metrics, self._door = verifiers, metrics, door

    def hold(self, claim: Claim, ticket: Ticket) -> HeldGroup:
        """Return the record of a ticket that was just claimed."""
        return HeldGroup(claim, ticket)

    def unfit(self, ticket: Ticket) -> str:
        """Return why the rollouts of a ticket cannot be run, or ""."""
        environment = self._config.environment_of(ticket.source)
        if environment is None or environment.name not in self._pools:
            return f"the prompt source {ticket.source!r} has no environment"
        try:
            msgspec.json.decode(ticket.row, type=Row)
        except msgspec.DecodeError as error:
            return f"the ticket carries no row: {error}"
        return ""

    async def complete(self, held: HeldGroup) -> tuple[Header, bytes] | None:
        """Run the rollouts of a ticket, score them, and return the header and the payload of its group.

        Returns None if its lease was lost. Raises `RolloutFailed`.
        """
        ticket = held.ticket
        try:
            done = await self._run(held)
        except LeaseLost:
            return None
        generated = time.monotonic()
        scores, notes, rewards = await self._score(ticket, done)
        segments = [each.segments for each in done]
        payload = b"" if ticket.version is not None else pack_payload(ticket, segments, notes)
        header = make_header(
            ticket,
            segments,
            scores,
            rewards,
            solved(scores, self._config.thresholds(ticket.source)),
            payload=held.claim.payload if payload else "",
            payload_bytes=len(payload),
            generator=self._name,
            generate_s=generated - held.started,
            score_s=time.monotonic() - generated,
            truncated=[each.truncated for each in done],
            turns=[each.turns for each in done],
            tool_s=[each.environment_s for each in done],
            tool_calls=[each.tool_calls for each in done],
            malformed_calls=[each.malformed_calls for each in done],
        )
        if ticket.version is None:
            self._metrics.observe(header, done)
        return header, payload

    async def keep_tokens(self, held: HeldGroup) -> None:
        """Do nothing: every turn is committed."""

    async def _run(self, group: HeldGroup) -> list[FinishedRollout]:
        """Run the rollouts of a ticket to their end, and return those that finished, by sample.

        Those that another pod began continue. Raises `RolloutFailed` if too few finish, and `LeaseLost`.
        """
        ticket = group.ticket
        minimum = ticket.group_size if ticket.version is not None else self._config.sampling.min_group_size or ticket.group_size
        begun = await self._tickets.turns(ticket.id)
        tasks = [
            asyncio.ensure_future(self._rollout(self._attempt(group, sample, *begun.get(sample, (0, [])))))
            for sample in range(ticket.group_size)
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # if one has failed, the others are still running
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if len(group.finished) < minimum:
            reasons = "; ".join(f"rollout {sample}: {why}" for sample, why in sorted(group.failed.items()))
            raise RolloutFailed(
                f"{len(group.finished)} of {ticket.group_size} rollouts finished, fewer than {minimum}: {reasons}"
            )
        return [done for _, done in sorted(group.finished.items())]

    async def _score(self, ticket: Ticket, done: list[FinishedRollout]) -> tuple[dict[str, list[float]], list[str], list[float]]:
        """Return the environment's scores with those of the source's verifiers, verifiers' notes, and the rewards [n]."""
        environment = self._config.environment_of(ticket.source)
        assert environment is not None, "the ticket was found fit"
        scores: dict[str, list[float]] = {}
        notes: list[str] = []
        if self._config.verified(ticket.source):
            finish, tokens = [each.finish for each in done], [each.answer_tokens for each in done]
            job = Job(ticket.source, [each.answer for each in done], ticket.answer, ticket.row, finish, tokens)
            found = await self._verifiers.score(job)
            scores, notes = dict(found.scores), found.notes
        own = [each.scores or {} for each in done]
        given = [each.get("score", 0.0) for each in own]
        if any(own) or environment.solved_at is not None:
            scores[environment.name] = given
        for part in sorted(set[str].intersection(*map(set, own)) - {"score"}):  # as of verifiers: those that all rollouts have
            scores[f"{environment.name}.{part}"] = [each[part] for each in own]
        others = combine(scores, self._config.verifiers) or [0.0] * len(done)
        return scores, notes, [mine + other for mine, other in zip(given, others, strict=True)]

    def _attempt(self, group: HeldGroup, sample: int, restarts: int, data: list[bytes]) -> Attempt:
        """Return the attempts at a rollout that another pod may have begun: it started again `restarts` times."""
        environment = self._config.environment_of(group.ticket.source)
        assert environment is not None, "the ticket was found fit"
        turns = TurnLog(self._tickets, self._name, group.claim, sample, restarts)
        return Attempt(group, sample, environment, turns, unpack_records(data), bool(data))

    async def _rollout(self, attempt: Attempt) -> None:
        """Run one rollout to its end, starting it again when it fails."""
        group, row = attempt.group, msgspec.json.decode(attempt.group.ticket.row, type=Row)
        while attempt.failures < MAX_ATTEMPTS and attempt.losses < MAX_LOSSES:
            await asyncio.sleep(PAUSES_S[min(attempt.failures, len(PAUSES_S) - 1)])
            live = self._restored(attempt)
            if live is not None:
                self._metrics.continued.inc()
            else:
                if attempt.begun:
                    await attempt.turns.restart()
                    self._metrics.restarts.inc()
                live = self._live(attempt, [])
            attempt.begun, attempt.records = True, []
            try:
                async with self._pools[attempt.environment.name].process() as process:
                    group.finished[attempt.sample] = await self._drive(live, process, attempt.environment, row)
                group.failed.pop(attempt.sample, None)
                return
            except (ProgramFailed, GenerationFailed, *REPLY_FAULTS) as error:
                if isinstance(error, ProcessLost):  # its program is gone, its turns are not
                    attempt.records = list(live.records)
                attempt.failed(error)
            finally:
                self._fleet.forget(live.place.name)
        self._metrics.left_out.inc()

    def _restored(self, attempt: Attempt) -> LiveRollout | None:
        """Return the rollout continued from its records; None if that is impossible, or the records are not a rollout's."""
        if not attempt.records or not restorable(attempt.records):
            return None
        try:
            return self._live(attempt, attempt.records)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:  # whatever damaged records cause
            log.warning(
                "a rollout's turns cannot be read: it starts again",
                ticket=attempt.group.ticket.id,
                sample=attempt.sample,
                error=repr(error),
            )
            return None

    def _live(self, attempt: Attempt, records: list[Record]) -> LiveRollout:
        ticket, environment = attempt.group.ticket, attempt.environment
        place = RolloutPlace(ticket, environment.name, attempt.sample, attempt.turns.restarts, attempt.name)
        manner = Manner.of(self._config, ticket.version)
        return LiveRollout(
            place, manner, self._chat, self._fleet, list(records), environment.max_turns, attempt.turns.commit, self._tracing
        )

    async def _drive(
        self, live: LiveRollout, process: ProgramProcess, environment: EnvironmentConfig, row: Row
    ) -> FinishedRollout:
        if drives_itself(environment):
            done = await run_agent(live, process, self._door, environment.timeout_s)
        else:
            done = await converse(live, process, row.messages)
        check_reward(done.scores, done.truncated, live.place.ticket.source, self._config)
        return done
