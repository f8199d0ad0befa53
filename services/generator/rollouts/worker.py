"""A worker: handles the claimed tickets of one kind, training or evaluation, in this process.

Guarantees: a claimed ticket is submitted, handed back or failed with a reason, or its lease expires and another pod claims it.
No failure of a ticket ends its worker's loop, except the end of the engine, which ends the process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from services.generator.engines.base import Engine, Generated, GenerationFailed, SamplingParameters
from services.generator.metrics import GeneratorMetrics
from services.generator.verifiers.base import Job, VerifierFailure, combine, solved
from services.generator.verifiers.scoring import Scoring
from services.protocol.errors import StoreError
from services.protocol.messages import Ticket
from services.runtime.loops import Broken, Loop, end_tasks
from services.runtime.service import Service
from services.store import Claim
from services.weights.receiver import EngineDead

log = structlog.get_logger()

LEASE_SHARE = 3  # renewals per lease
SUBMIT_AGAIN_S = 1.0
MAX_EXPIRIES = 16
"""Leases of one ticket that may expire, because the pod that held it died, before it is given up: one that kills its generator
may cost so many restarts, and pods that are evicted one after the other do not use them up."""


@dataclass
class Rollout:
    """A ticket being worked on."""

    claim: Claim
    ticket: Ticket
    started: float = field(default_factory=time.monotonic)
    completions: list[Generated | None] = field(default_factory=list)  # finished ones, by sample
    generating: bool = True  # until the last token of its last completion is there
    kept: bool = False  # whether the tokens of all its completions are saved
    submitting: bool = False  # from then on only Redis decides who owns the ticket
    task: asyncio.Task[None] | None = None

    def request(self, sample: int) -> str:
        """Return the engine's id of one completion."""
        return f"{self.claim.payload}.{sample}"


@dataclass(frozen=True)
class Scored:
    """A finished group of n completions."""

    completions: list[Generated]  # [n]
    scores: dict[str, list[float]]  # verifier, or verifier.part -> [n]
    rewards: list[float]  # [n]
    solved: list[bool]  # [n], or empty
    notes: list[str]  # [n] JSON, or empty
    generate_s: float
    score_s: float


class RolloutWorker:
    """Takes claimed tickets through generation and scoring. A subclass claims them and submits the results."""

    room = "room"
    """Notification topic of this process: a ticket has ended, so another may be claimed."""

    def __init__(
        self,
        service: Service,
        engine: Engine,
        tokenizer: Any,
        verifiers: Scoring,
        metrics: GeneratorMetrics,
        sampling: SamplingParameters,
    ) -> None:
        """`tokenizer` is the model's, as transformers loads it."""
        self.service, self.engine, self.tokenizer, self.verifiers, self.metrics = service, engine, tokenizer, verifiers, metrics
        self.store, self.notifications, self.config, self.sampling = (
            service.store,
            service.notifications,
            service.config,
            sampling,
        )
        self.name = service.status.name
        self.rollouts: dict[str, Rollout] = {}  # by entry of the claim
        self._fault: BaseException | None = None

    async def submit(self, rollout: Rollout) -> bool:
        """Generate, score and submit a ticket; return False if its lease had been lost."""
        raise NotImplementedError

    async def report(self, claim: Claim, reason: str, max_attempts: int) -> bool:
        """Hand a ticket back after a failure; return True if it reached `max_attempts` and is not retried."""
        raise NotImplementedError

    async def extend(self, claims: Sequence[Claim]) -> set[str]:
        """Renew leases and return the entries that are lost."""
        raise NotImplementedError

    async def generate(self, request_id: str, prompt: list[int], seed: int, prefix: Generated | None) -> Generated:
        """Generate one completion."""
        return await self.engine.generate(request_id, prompt, seed, self.sampling, prefix)

    async def abort(self) -> None:
        """Hand back what is being generated, since the pause does not let it finish."""
        raise NotImplementedError

    def check_engine(self) -> None:
        """Raise `Broken` if the engine has died; leases then expire and other pods take over."""
        if self._fault is not None:
            raise Broken(str(self._fault))

    async def start(self, claim: Claim) -> None:
        """Begin to work on a ticket. One that cannot be worked on fails for good."""
        fault = "the ticket is corrupt" if claim.ticket is None else self._unfit(claim.ticket)
        if fault or claim.ticket is None:
            await self.report(claim, fault, max_attempts=1)
            return
        if held := self.rollouts.pop(claim.entry, None):  # our own lease expired and we claimed the ticket again
            await self.cancel(held)
        rollout = Rollout(claim, claim.ticket)
        self.rollouts[claim.entry] = rollout
        rollout.task = asyncio.create_task(self._complete(rollout), name=claim.ticket_id)

    def _unfit(self, ticket: Ticket) -> str:
        longest = len(ticket.prompt) + self.sampling.max_tokens
        if longest > self.config.model.max_tokens:
            return f"prompt and completion of up to {longest} tokens exceed model.max_tokens = {self.config.model.max_tokens}"
        if not ticket.prompt or min(ticket.prompt) < 0 or max(ticket.prompt) >= len(self.tokenizer):
            return f"the prompt is empty or has token ids outside 0..{len(self.tokenizer) - 1}, the tokenizer's vocabulary"
        return ""

    async def _complete(self, rollout: Rollout) -> None:
        """Take one ticket from claim to submission; turn any error into a failure with a reason."""
        structlog.contextvars.bind_contextvars(ticket=rollout.ticket.id)
        try:
            if not await self.submit(rollout):
                self.metrics.refused.inc()
        except VerifierFailure as failure:
            self.metrics.failures["verifier"].inc()
            await self._fail(rollout, str(failure), 1 if failure.final else self.config.generator.max_attempts)
        except GenerationFailed as failure:
            self.metrics.failures["generation"].inc()
            await self._fail(rollout, str(failure), self.config.generator.max_attempts)
        except EngineDead as error:
            self._fault = error  # the worker's loop ends the process
        except StoreError as error:  # not the ticket's fault: its lease expires, and it is claimed again
            self.metrics.failures["store"].inc()
            log.warning("rollout abandoned: Redis unavailable", error=str(error))
        except Exception as error:  # a ticket must not end the loop; it is retried, then moved to the dead letters
            self.metrics.failures["other"].inc()
            log.warning("rollout failed", exc_info=True)
            await self._fail(rollout, f"{type(error).__name__}: {error}", self.config.generator.max_attempts)
        finally:
            if self.rollouts.get(rollout.claim.entry) is rollout:
                del self.rollouts[rollout.claim.entry]
            self.notifications.notify(self.room)

    async def _fail(self, rollout: Rollout, reason: str, max_attempts: int) -> None:
        try:
            await self.keep_tokens(rollout)
            given_up = await self.report(rollout.claim, reason, max_attempts)
        except StoreError as error:  # its lease expires, and it is claimed again
            log.warning("failure not reported", reason=reason, error=str(error))
            return
        if given_up:
            self.metrics.given_up.inc()
            log.error("ticket moved to dead letters", reason=reason)

    async def keep_tokens(self, rollout: Rollout) -> None:
        """Keep the tokens of a ticket whose completions are finished, so that it can be scored again without sampling again."""

    @property
    def generating(self) -> int:
        """Number of tickets that use the engine."""
        return sum(rollout.generating for rollout in self.rollouts.values())

    async def complete(self, rollout: Rollout, prefixes: Sequence[Generated | None]) -> Scored:
        """Return all completions of a ticket and their rewards, continuing or keeping those in `prefixes` [n]."""
        ticket = rollout.ticket
        rollout.completions = [None] * ticket.group_size

        async def one(sample: int) -> Generated:
            prefix = prefixes[sample]
            if prefix is not None and prefix.finish != "aborted":
                done = prefix
            else:
                done = await self.generate(rollout.request(sample), ticket.prompt, ticket.seed + sample, prefix)
            if done.finish == "aborted":
                raise GenerationFailed(f"the engine stopped completion {sample} before it was finished")
            rollout.completions[sample] = done
            return done

        tasks = [asyncio.ensure_future(one(sample)) for sample in range(ticket.group_size)]
        try:
            completions = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # if one has failed, the others are still running
                task.cancel()
        rollout.generating = False
        self.notifications.notify(self.room)  # its seats in the engine are free while it is scored
        generated = time.monotonic()
        tokens = [completion.tokens.tolist() for completion in completions]
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        finish = [completion.finish for completion in completions]
        found = await self.verifiers.score(Job(ticket.source, texts, ticket.answer, ticket.row, finish, tokens))
        rewards = combine(found.scores, self.config.verifiers)
        scored, tracing = time.monotonic(), self.service.tracing
        sampled = sum(map(len, tokens))
        tracing.record("generate", ticket.trace, rollout.started, generated, tokens=sampled, version=self.engine.version)
        tracing.record("verify", ticket.trace, generated, scored, reward=sum(rewards) / len(rewards))
        return Scored(
            completions, found.scores, rewards, solved(found.scores, self.config.thresholds(ticket.source)), found.notes,
            generated - rollout.started, scored - generated,
        )  # fmt: skip

    async def submit_with_retry(self, rollout: Rollout, submit: Callable[[], Awaitable[bool]]) -> bool:
        """Submit until Redis answers; the group is kept as long as no other pod has the ticket."""
        rollout.submitting = True
        started = time.monotonic()
        while True:
            try:
                accepted = await submit()
                self.metrics.submit_s.observe(time.monotonic() - started)
                self.service.tracing.record("submit", rollout.ticket.trace, started, accepted=accepted)
                return accepted
            except StoreError as error:  # Redis is unavailable or full
                log.warning("submission failed, retrying", error=str(error))
                await asyncio.sleep(SUBMIT_AGAIN_S)

    async def renew(self, loop: Loop) -> None:
        """Renew the leases of everything in progress; drop tickets that were lost to another pod."""
        while True:
            held = list(self.rollouts.values())
            if held:
                lost = await self.extend([rollout.claim for rollout in held])
                for rollout in held:
                    still = self.rollouts.get(rollout.claim.entry) is rollout
                    if rollout.claim.entry in lost and not rollout.submitting and still:
                        self.metrics.lost.inc()
                        log.warning("lease lost", ticket=rollout.ticket.id)
                        await self.cancel(rollout)
            loop.progress()
            await asyncio.sleep(self.config.generator.lease_s / LEASE_SHARE)

    async def cancel(self, rollout: Rollout) -> None:
        """Stop working on a ticket."""
        if rollout.task is not None:
            await end_tasks([rollout.task])
        if self.rollouts.get(rollout.claim.entry) is rollout:
            del self.rollouts[rollout.claim.entry]
