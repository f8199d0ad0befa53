"""The evaluation worker of a generator: stay on one policy version, complete the round's tickets, then return to training.

Guarantees: while a round holds this pod, its weights do not change (it declines sync rounds). Every token of a result was
sampled by the round's version; otherwise the ticket fails. Environments, which hold tickets of their own, are served by
the same version. When no ticket is left for this pod or an environment, it returns to training.
Waits for: an open round of the version that it holds, tickets of that round. Unblocked by: dataprep and other volunteers
(`evaluation`), the weight follower, which offers the pod between sync rounds, its own finished tickets (`evaluated`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import structlog

from services.generator.engines.base import Engine
from services.generator.metrics import GeneratorMetrics
from services.generator.rollouts.concurrency import Bounds
from services.generator.rollouts.worker import Rollout, RolloutWorker
from services.generator.serving import Serving
from services.protocol.errors import StoreError
from services.protocol.generation import GenerationRequest
from services.rollouts.generated import GenerationFailed, SamplingParameters, Segment
from services.rollouts.holding import MAX_EXPIRIES
from services.rollouts.records import make_header, mixed
from services.runtime.loops import Loop
from services.runtime.service import Service
from services.store import Claim
from services.verifiers.scoring import Scoring

log = structlog.get_logger()

IDLE_S = 1.0  # the longest delay that a missed notification can cause


class EvaluationWorker(RolloutWorker):
    """Completes evaluation tickets while a round holds this pod."""

    room = "evaluated"

    def __init__(self, service: Service, engine: Engine, tokenizer: Any, verifiers: Scoring, metrics: GeneratorMetrics) -> None:
        super().__init__(service, engine, tokenizer, verifiers, metrics, SamplingParameters.evaluation(service.config))
        self.version: int | None = None
        """The policy version that this pod is kept on, or None while it trains."""
        self._member = service.status.member
        training = Bounds.of(self.config).runnable * self.config.sampling.group_size
        self._limit = max(1, training // self.config.evaluation.samples)  # tickets, for as many completions as in training
        self._closed = self._leaving = False
        self._returned: list[Claim] = []  # tickets that were given up, until the round knows
        self.serving = Serving(self.config, engine, self.sampling, self._unable, self.engine_died)
        self._turns = asyncio.Lock()  # keeps claims from racing with handing everything back

    @property
    def busy(self) -> bool:
        """Whether anything is in progress: tickets, or completions for environments."""
        return bool(self.rollouts or len(self.serving))

    def _unable(self, request: GenerationRequest) -> str:
        """Return why this pod cannot complete a request of an evaluation now, or ""."""
        if self.version != request.version or self._leaving or self._closed:
            return f"does not evaluate policy version {request.version}"
        return "paused" if self.service.view.paused else ""

    async def offer(self) -> None:
        """Volunteer for an open round of the version held. Called only by the weight follower, never inside a sync round."""
        given = self.config.evaluation
        held = self.version is not None or self._closed or self.service.view.paused
        if not given.every_steps or held or not self.engine.whole:
            return
        version = self.engine.version
        try:
            admitted = await self.store.evaluation.volunteer(
                self._member, version, self.service.status.trainer_fence, self.config.fleet.ttl_s, given.max_generators,
                given.min_training_generators,
            )  # fmt: skip
        except StoreError as error:  # the next turn volunteers again; until then the pod follows sync rounds
            log.warning("could not volunteer for evaluation", error=str(error))
            return
        if admitted:
            log.info("evaluating", version=version)
            self.version = version
            self.service.say(phase="evaluating", world=0)
            self.notifications.notify(self.room)

    async def work(self, loop: Loop) -> None:
        """Complete tickets whenever a round holds this pod, until cancelled."""
        while True:
            loop.progress()
            self.check_engine()
            async with self._turns:
                if self.version is not None and not self.service.view.paused and not self._closed:
                    await self._turn(self.version)
            await self.notifications.wait("evaluation", "control", self.room, timeout=IDLE_S)

    async def _turn(self, version: int) -> None:
        """Claim as many tickets as fit; return to training when none are left or the round is over."""
        room = self._limit - len(self.rollouts)
        if room <= 0:
            return
        found = await self.store.evaluation.claim(self._member, version, self.config.generator.lease_s, room, MAX_EXPIRIES)
        for rollout in list(self.rollouts.values()) if found is None else ():
            await self.cancel(rollout)
        for claim in found.claims if found else ():
            await self.start(claim)
        if not self.rollouts and not (found and found.environments):
            await self._hand_back()

    async def abort(self) -> None:
        """Hand everything back: other generators complete the round, or this one after the pause."""
        async with self._turns:
            await self._hand_back()

    async def _hand_back(self) -> None:
        """Give up the round and all its tickets. Unless the pod is ending, it returns to training."""
        for rollout in list(self.rollouts.values()):
            self._returned.append(rollout.claim)
            await self.cancel(rollout)
        if self.version is not None:
            self._leaving = True
            try:
                await self.serving.abort()  # environments continue them on another volunteer
                await self.store.evaluation.resign(self._member, self._returned)
            finally:
                self._leaving = False  # without Redis it is still a volunteer, and serves the round
            self._returned = []
            log.info("returning to training", version=self.version)
            self.version = None
            if not self._closed:
                self.service.say(phase="ready", world=self.engine.world)

    def close(self) -> None:
        """Stop volunteering and claiming; tickets in progress continue."""
        self._closed = True

    async def drain(self) -> None:
        """Hand everything back before the process ends."""
        self.close()
        with contextlib.suppress(StoreError):  # without Redis the pod must still exit; its leases expire
            async with self._turns:
                await self._hand_back()

    async def report(self, claim: Claim, reason: str, max_attempts: int) -> bool:
        """Hand a ticket back, or report that the round cannot be completed."""
        return await self.store.evaluation.fail(self._member, claim, reason, max_attempts)

    async def extend(self, claims: Sequence[Claim]) -> set[str]:
        """Renew leases and return the entries that are lost."""
        return await self.store.evaluation.renew(self._member, claims, self.config.generator.lease_s)

    async def submit(self, rollout: Rollout) -> bool:
        """Generate, score and submit a ticket. Its tokens are not sent."""
        ticket = rollout.ticket
        done = await self.complete(rollout, [None] * ticket.group_size)
        header = make_header(
            ticket, [[Segment(completion)] for completion in done.completions], done.scores, done.rewards, done.solved,
            payload="", payload_bytes=0, generator=self.name, generate_s=done.generate_s, score_s=done.score_s,
        )  # fmt: skip
        if fault := mixed(header, ticket.epoch):
            raise GenerationFailed(fault)
        return await self.submit_with_retry(rollout, lambda: self.store.evaluation.submit(self._member, rollout.claim, header))
