"""Runs and scores the rollouts of one ticket, whether they are trained on or evaluate a version.

Guarantees: a rollout that fails starts again by itself; the others of its group are kept. A rollout that fails for good leaves
its group; a failure is never a reward.
Waits for: the rollouts' environments and the policy. Unblocked by: their replies, or their time limits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import structlog

from services.config import RunConfig
from services.config.environments import EnvironmentConfig, drives_itself
from services.environment.agent import Door, run_agent
from services.environment.chat.format import ChatFormat
from services.environment.conversation import converse, restorable
from services.environment.generators import GeneratorFleet
from services.environment.metrics import EnvironmentMetrics
from services.environment.programs.pool import ProgramPool
from services.environment.programs.process import ProcessLost, ProgramFailed, ProgramProcess, check_reward
from services.environment.records import Record
from services.environment.rollout import FinishedRollout, LeaseLost, LiveRollout, Manner, RolloutPlace, records_of
from services.protocol.messages import Header, Row, Ticket
from services.rollouts.generated import GenerationFailed, RolloutFailed
from services.rollouts.holding import HeldTicket
from services.rollouts.records import make_header
from services.runtime.tracing import TraceRecorder
from services.verifiers.base import Job, Scores, combine, solved
from services.verifiers.scoring import Scoring

log = structlog.get_logger()

PAUSES_S = (0.0, 0.0, 5.0, 30.0)
"""Pauses before a rollout's attempts, by failures so far: its services may be unavailable for seconds, for example while a
server restarts."""
REPLY_FAULTS = (ValueError, TypeError, RecursionError)
"""What replies of a program or of the policy may raise here, such as a tool call with arguments that are nested too deeply."""
MAX_LOSSES = 16
"""How often a rollout may lose its process because of others before it is left out."""


@dataclass
class HeldGroup(HeldTicket):
    """A ticket whose rollouts run."""

    finished: dict[int, FinishedRollout] = field(default_factory=dict[int, FinishedRollout])  # by sample
    failed: dict[int, str] = field(default_factory=dict[int, str])  # by sample: why it failed for good


class TurnLog(Protocol):
    """Where the turns of one ticket are kept."""

    async def commit(self, sample: int, restarts: int, at: int, record: bytes) -> bool:
        """Append a record of a rollout at a place. Returns False if another pod holds the ticket."""
        ...

    async def restart(self, sample: int, restarts: int) -> bool:
        """Forget a rollout's turns. Returns False if another pod holds the ticket."""
        ...


@dataclass(frozen=True)
class ScoredGroup:
    """The finished rollouts of a group, by sample, and their rewards."""

    rollouts: list[FinishedRollout]
    scores: Scores
    rewards: list[float]


class GroupRunner:
    """Runs the rollouts of tickets. Shared by all tickets of a pod."""

    def __init__(
        self, config: RunConfig, chat: ChatFormat, fleet: GeneratorFleet, pools: Mapping[str, ProgramPool], verifiers: Scoring,
        metrics: EnvironmentMetrics, door: Door, tracing: TraceRecorder,
    ) -> None:  # fmt: skip
        """`pools` are the environments' processes, by name."""
        self._config, self._chat, self._fleet, self._pools = config, chat, fleet, pools
        self._verifiers, self._metrics, self._door, self._tracing = verifiers, metrics, door, tracing

    @property
    def waiting(self) -> str:
        """The scoring service that is unavailable, or ""."""
        return self._verifiers.waiting

    @property
    def seats(self) -> int:
        """Number of completions that the current generators run at a time."""
        return self._fleet.seats

    @property
    def evaluating(self) -> frozenset[int]:
        """Policy versions that generators are kept on, for evaluation."""
        return self._fleet.evaluating

    @property
    def evaluation_seats(self) -> int:
        """Number of completions that the evaluating generators run at a time."""
        return self._fleet.evaluation_seats

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

    async def run(
        self, group: HeldGroup, manner: Manner, turns: TurnLog, begun: Mapping[int, tuple[int, list[bytes]]], minimum: int
    ) -> list[FinishedRollout]:
        """Run the rollouts of a fit ticket to their end, and return those that finished, by sample.

        `begun` holds, by sample, the restarts and the records of rollouts that another pod began. Raises `RolloutFailed` if
        fewer than `minimum` finish, and `LeaseLost`.
        """
        environment, ticket = self._config.environment_of(group.ticket.source), group.ticket
        assert environment is not None, "the ticket was found fit"
        tasks = [
            asyncio.ensure_future(self._rollout(group, environment, manner, turns, sample, *begun.get(sample, (0, []))))
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

    async def score(self, ticket: Ticket, done: list[FinishedRollout]) -> ScoredGroup:
        """Return the environment's scores with those of the source's verifiers, and the rewards that they sum to."""
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
        return ScoredGroup(done, Scores(scores, notes), [mine + other for mine, other in zip(given, others, strict=True)])

    def header(self, group: HeldGroup, found: ScoredGroup, generator: str, generated: float, payload: int = 0) -> Header:
        """Return the header of a group whose last rollout ended at the monotonic time `generated`; `payload`: its bytes."""
        ticket, done = group.ticket, found.rollouts
        return make_header(
            ticket, [each.segments for each in done], found.scores.scores, found.rewards,
            solved(found.scores.scores, self._config.thresholds(ticket.source)),
            payload=group.claim.payload if payload else "", payload_bytes=payload, generator=generator,
            generate_s=generated - group.started, score_s=time.monotonic() - generated,
            truncated=[each.truncated for each in done], turns=[each.turns for each in done],
            tool_s=[each.environment_s for each in done], tool_calls=[each.tool_calls for each in done],
            malformed_calls=[each.malformed_calls for each in done],
        )  # fmt: skip

    async def _rollout(
        self, group: HeldGroup, environment: EnvironmentConfig, manner: Manner, turns: TurnLog, sample: int, restarts: int,
        data: list[bytes],
    ) -> None:  # fmt: skip
        """Run one rollout to its end, starting it again when it fails."""
        row, records = msgspec.json.decode(group.ticket.row, type=Row), records_of(data)
        begun, failures, losses = bool(data), 0, 0
        while failures < self._config.generator.max_attempts and losses < MAX_LOSSES:
            await asyncio.sleep(PAUSES_S[min(failures, len(PAUSES_S) - 1)])
            live = self._restored(group, environment, manner, turns, sample, restarts, records) if records else None
            if live is not None:
                self._metrics.continued.inc()
            else:
                if begun:
                    restarts += 1
                    if not await turns.restart(sample, restarts):
                        raise LeaseLost
                    self._metrics.restarts.inc()
                live = self._live(group, environment, manner, turns, sample, restarts, [])
            begun, records = True, []
            try:
                async with self._pools[environment.name].process() as process:
                    group.finished[sample] = await self._drive(live, process, environment, row)
                group.failed.pop(sample, None)
                return
            except (ProgramFailed, GenerationFailed, *REPLY_FAULTS) as error:
                if isinstance(error, ProcessLost):  # its program is gone, its turns are not
                    records = list(live.records)
                blameless = isinstance(error, ProcessLost) and not error.suspected
                losses, failures = losses + blameless, failures + (not blameless)
                log.warning(
                    "rollout failed", ticket=group.ticket.id, sample=sample, failures=failures, error=str(error),
                    exc_info=isinstance(error, REPLY_FAULTS),
                )  # fmt: skip
                group.failed[sample] = str(error)
            finally:
                self._fleet.forget(live.place.name)
        self._metrics.left_out.inc()

    def _restored(
        self, group: HeldGroup, environment: EnvironmentConfig, manner: Manner, turns: TurnLog, sample: int, restarts: int,
        records: list[Record],
    ) -> LiveRollout | None:  # fmt: skip
        """Return a rollout continued from its records; None if that is impossible, or the records are not a rollout's."""
        if not restorable(records):
            return None
        try:
            return self._live(group, environment, manner, turns, sample, restarts, records)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:  # whatever damaged records cause
            log.warning(
                "a rollout's turns cannot be read: it starts again", ticket=group.ticket.id, sample=sample, error=repr(error)
            )
            return None

    async def _drive(
        self, live: LiveRollout, process: ProgramProcess, environment: EnvironmentConfig, row: Row
    ) -> FinishedRollout:
        if drives_itself(environment):
            done = await run_agent(live, process, self._door, environment.timeout_s)
        else:
            done = await converse(live, process, row.messages)
        check_reward(done.scores, done.truncated, live.place.ticket.source, self._config)
        return done

    def _live(
        self, group: HeldGroup, environment: EnvironmentConfig, manner: Manner, turns: TurnLog, sample: int, restarts: int,
        records: list[Record],
    ) -> LiveRollout:  # fmt: skip
        place = RolloutPlace(group.ticket, environment.name, sample, restarts, f"{group.claim.payload}.{sample}.{restarts}")

        async def commit(at: int, record: bytes) -> bool:
            return await turns.commit(sample, restarts, at, record)

        return LiveRollout(place, manner, self._chat, self._fleet, list(records), environment.max_turns, commit, self._tracing)
