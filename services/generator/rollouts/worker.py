"""A worker: completes and scores the claimed tickets of one kind, training or evaluation, with this process's engine.

Guarantees: those of a holder of tickets (services/rollouts/holding.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.generator.engines.base import Engine
from services.generator.metrics import GeneratorMetrics
from services.protocol.messages import Ticket
from services.rollouts.generated import Generated, GenerationFailed, SamplingParameters
from services.rollouts.holding import HeldTicket, TicketHolder
from services.runtime.service import Service
from services.runtime.tracing import gen_ai
from services.store import Claim
from services.verifiers.base import Job, combine, solved
from services.verifiers.scoring import Scoring


@dataclass
class Rollout(HeldTicket):
    """A ticket being completed."""

    completions: list[Generated | None] = field(default_factory=list)  # finished ones, by sample
    generating: bool = True  # until the last token of its last completion is there
    kept: bool = False  # whether the tokens of all its completions are saved

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


class RolloutWorker(TicketHolder[Rollout]):
    """Takes claimed tickets through generation and scoring. A subclass claims them and submits the results."""

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
        super().__init__(service, metrics)
        self.engine, self.tokenizer, self.verifiers, self.metrics, self.sampling = engine, tokenizer, verifiers, metrics, sampling

    async def generate(self, request_id: str, prompt: list[int], seed: int, prefix: Generated | None) -> Generated:
        """Generate one completion."""
        return await self.engine.generate(request_id, prompt, seed, self.sampling, prefix)

    @property
    def held(self) -> tuple[int, int]:
        """Return what identifies the weights that the engine holds, as in `RunState.published`."""
        return self.service.status.trainer_fence, self.engine.version

    @property
    def busy(self) -> bool:
        """Whether anything is in progress."""
        return bool(self.rollouts)

    async def abort(self) -> None:
        """Hand back tickets being generated, since the pause does not let them finish."""
        raise NotImplementedError

    def hold(self, claim: Claim, ticket: Ticket) -> Rollout:
        """Return the record of a ticket that was just claimed."""
        return Rollout(claim, ticket)

    def unfit(self, ticket: Ticket) -> str:
        """Return why a ticket cannot be completed, or ""."""
        longest = len(ticket.prompt) + self.sampling.max_tokens
        if longest > self.config.model.max_tokens:
            return f"prompt and completion of up to {longest} tokens exceed model.max_tokens = {self.config.model.max_tokens}"
        if not ticket.prompt or min(ticket.prompt) < 0 or max(ticket.prompt) >= len(self.tokenizer):
            return f"the prompt is empty or has token ids outside 0..{len(self.tokenizer) - 1}, the tokenizer's vocabulary"
        return ""

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
        if ticket.trace:
            told = gen_ai.inference("text_completion", self.sampling, len(ticket.prompt), sampled, finish)
            tracing.record("generate", ticket.trace, rollout.started, generated, told, version=self.engine.version)
        tracing.record("verify", ticket.trace, generated, scored, reward=sum(rewards) / len(rewards))
        return Scored(
            completions, found.scores, rewards, solved(found.scores, self.config.thresholds(ticket.source)), found.notes,
            generated - rollout.started, scored - generated,
        )  # fmt: skip
