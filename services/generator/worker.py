"""Completes and scores claimed tickets, of training and of evaluation, with this process's engine and verifiers.

Guarantees: a ticket continues from the tokens that an earlier holder saved; tokens are saved every few seconds, and when a ticket
fails or is handed back.
Waits for: the engine, verifiers. Unblocked by: both. Unblocks: the pod's loop, when a group has its last token (`ROOM`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.chat.reply import completion_texts
from services.generator.engines.base import Engine
from services.generator.metrics import GeneratorMetrics
from services.groups.generated import Generated, GenerationFailed, SamplingParameters, Segment
from services.groups.records import make_header, pack_partial, pack_payload, unpack_partial
from services.protocol.messages import Header, Ticket
from services.runtime.holding import PAYLOAD_TTL_S, ROOM, HeldTicket
from services.runtime.service import Service
from services.runtime.tracing import gen_ai
from services.store import Claim
from services.verifiers.base import Job, combine, solved
from services.verifiers.scoring import Scoring

NOTHING = Generated(np.zeros(0, np.int32), np.zeros(0, np.float32), [], "aborted")


@dataclass
class RunningGroup(HeldTicket):
    """A ticket being completed."""

    completions: list[Generated | None] = field(default_factory=list)  # finished ones, by sample
    generating: bool = True  # until the last token of its last completion is there
    kept: bool = False  # whether the tokens of all its completions are saved

    def request(self, sample: int) -> str:
        """Return the engine's id of one completion."""
        return f"{self.claim.payload}.{sample}"


class GroupWorker:
    """Takes claimed tickets through generation and scoring."""

    def __init__(
        self,
        service: Service,
        engine: Engine,
        tokenizer: Any,
        verifiers: Scoring,
        metrics: GeneratorMetrics,
    ) -> None:
        """`tokenizer` is the model's, as transformers loads it."""
        self._service, self._config, self._tickets = service, service.config, service.store.tickets
        self._engine, self._tokenizer, self._metrics = engine, tokenizer, metrics
        self.verifiers = verifiers

    def hold(self, claim: Claim, ticket: Ticket) -> RunningGroup:
        """Return the record of a ticket that was just claimed."""
        return RunningGroup(claim, ticket, completions=[None] * ticket.group_size)

    def unfit(self, ticket: Ticket) -> str:
        """Return why a ticket cannot be completed, or ""."""
        longest = len(ticket.prompt) + SamplingParameters.of(self._config, ticket.version).max_tokens
        if longest > self._config.model.max_tokens:
            return f"prompt and completion of up to {longest} tokens exceed model.max_tokens = {self._config.model.max_tokens}"
        if not ticket.prompt or min(ticket.prompt) < 0 or max(ticket.prompt) >= len(self._tokenizer):
            return f"the prompt is empty or has token ids outside 0..{len(self._tokenizer) - 1}, the tokenizer's vocabulary"
        return ""

    async def complete(self, held: RunningGroup) -> tuple[Header, bytes]:
        """Return the header and the payload of a ticket's group. The tokens of an evaluation are not sent."""
        ticket = held.ticket
        sampling = SamplingParameters.of(self._config, ticket.version)
        completions = await self._generate(held, sampling)
        generated = time.monotonic()
        tokens = [completion.tokens.tolist() for completion in completions]
        texts = completion_texts(self._tokenizer, ticket.prompt, tokens)
        finish = [completion.finish for completion in completions]
        found = await self.verifiers.score(Job(ticket.source, texts, ticket.answer, ticket.row, finish, tokens))
        rewards = combine(found.scores, self._config.verifiers)
        scored = time.monotonic()
        if ticket.trace:
            shape = sampling.temperature, sampling.max_tokens, len(ticket.prompt), sum(map(len, tokens))
            told = gen_ai.inference("text_completion", *shape, finish)
            tracing = self._service.tracing
            tracing.record("generate", ticket.trace, held.started, generated, told, version=self._engine.version)
            tracing.record("verify", ticket.trace, generated, scored, reward=sum(rewards) / len(rewards))
        segments = [[Segment(completion)] for completion in completions]
        payload = b"" if ticket.version is not None else pack_payload(ticket, segments, found.notes)
        header = make_header(
            ticket,
            segments,
            found.scores,
            rewards,
            solved(found.scores, self._config.thresholds(ticket.source)),
            payload=held.claim.payload if payload else "",
            payload_bytes=len(payload),
            generator=self._service.status.name,
            generate_s=generated - held.started,
            score_s=scored - generated,
        )
        if ticket.version is None:
            self._metrics.observe(header)
        return header, payload

    async def _generate(self, held: RunningGroup, sampling: SamplingParameters) -> list[Generated]:
        """Return all completions of a ticket, continuing or keeping those that an earlier holder saved."""
        ticket = held.ticket
        saved = await self._tickets.load_partial(ticket.id)
        prefixes = unpack_partial(saved, ticket.group_size, sampling.max_tokens, self._engine.vocabulary)

        async def one(sample: int) -> Generated:
            done = prefix = prefixes[sample]
            if prefix is None or prefix.finish == "aborted":
                done = await self._engine.generate(held.request(sample), ticket.prompt, ticket.seed + sample, sampling, prefix)
            if done is None or done.finish == "aborted":
                raise GenerationFailed(f"the engine stopped completion {sample} before it was finished")
            held.completions[sample] = done
            return done

        tasks = [asyncio.ensure_future(one(sample)) for sample in range(ticket.group_size)]
        try:
            completions = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # if one has failed, the others are still running
                task.cancel()
        held.generating = False
        self._service.notifications.notify(ROOM)  # its seats in the engine are free while it is scored
        return completions

    def begun(self, held: RunningGroup) -> bool:
        """Return whether anything was sampled for a ticket."""
        return any(len(each.tokens) for each in self.so_far(held))

    def so_far(self, held: RunningGroup) -> list[Generated]:
        """Return the tokens so far of each completion of a ticket."""
        running = self._engine.snapshot([held.request(sample) for sample in range(held.ticket.group_size)])
        return [done or running.get(held.request(sample), NOTHING) for sample, done in enumerate(held.completions)]

    async def save(self, held: RunningGroup, so_far: Sequence[Generated]) -> int:
        """Save the tokens so far of a ticket, for whoever claims it next, and return how many there are."""
        tokens = sum(len(completion.tokens) for completion in so_far)
        if tokens:
            name = self._service.status.name
            await self._tickets.save_partial(name, held.claim, pack_partial(so_far), PAYLOAD_TTL_S)
        return tokens

    async def keep_tokens(self, held: RunningGroup) -> None:
        """Save the tokens of a ticket whose completions are finished but not scored."""
        if not (held.generating or held.submitting):
            await self.save(held, self.so_far(held))
