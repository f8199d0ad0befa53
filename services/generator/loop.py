"""The generator's main loop: claim tickets, generate, score, submit; hand back what it cannot finish.

Guarantees: a claimed ticket is submitted, handed back or failed with a reason, or its lease runs out and another pod
claims it; tickets are claimed only while the engine holds the published weights.
Waits for: tickets, a published version, the end of a pause, room in the engine. Unblocked by: dataprep (`tickets`), the
trainer (`version`), operators (`control`), its own finished groups (`room`).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog

from services.generator.engine import Engine, EngineDead, Generated, GenerationFailed
from services.generator.metrics import GeneratorMetrics
from services.generator.rewards.base import VerifierFailure, combine
from services.generator.rewards.pool import VerifierPool
from services.generator.rollout import make_header, pack_partial, pack_payload, unpack_partial
from services.protocol.errors import StoreError
from services.protocol.messages import Ticket
from services.protocol.store import Claim
from services.runtime.loops import Broken, Loop, end_tasks
from services.runtime.service import Service

log = structlog.get_logger()

IDLE_S = 1.0  # a missed ring costs at most this much
SUBMIT_AGAIN_S = 1.0
LEASE_SHARE = 3  # renewals per lease
NOTHING = Generated(np.zeros(0, np.int32), np.zeros(0, np.float32), [], "aborted")


@dataclass
class Rollout:
    """A ticket being worked on."""

    claim: Claim
    ticket: Ticket
    started: float = field(default_factory=time.monotonic)
    completions: list[Generated | None] = field(default_factory=list)  # finished ones, by sample
    generating: bool = True
    submitting: bool = False  # from then on Redis alone decides who owns the ticket
    task: asyncio.Task[None] | None = None

    def request(self, sample: int) -> str:
        """Identity of one completion in the engine."""
        return f"{self.claim.payload}.{sample}"


class RolloutLoop:
    """Keeps the engine full of claimed tickets."""

    def __init__(
        self, service: Service, engine: Engine, tokenizer: Any, verifiers: VerifierPool, metrics: GeneratorMetrics
    ) -> None:
        """`tokenizer` is the model's, as transformers loads it."""
        self.service, self.engine, self.tokenizer, self.verifiers, self.metrics = service, engine, tokenizer, verifiers, metrics
        self.store, self.bell, self.config = service.store, service.bell, service.config
        self.name = service.status.name
        self.rollouts: dict[str, Rollout] = {}
        self.draining = asyncio.Event()
        self._fault: BaseException | None = None
        self._scan = "0-0"
        self._adopt = True

    def why_idle(self) -> str:
        """Why no ticket would be claimed now; empty: it would."""
        state = self.service.view.state
        if self.draining.is_set():
            return "draining"
        if state is None:
            return "the run does not exist yet"
        if self.service.view.paused:
            return f"paused: {state.paused[self.service.kind]}"
        if self.engine.version != state.published_version or self.engine.version < 0:
            return f"holds policy version {self.engine.version}, published is {state.published_version}"
        return ""

    async def work(self, loop: Loop) -> None:
        """Claim and complete tickets until told to stop, then drain."""
        while not (self.service.stopping.is_set() or self.draining.is_set()):
            loop.progress()
            if self._fault is not None:
                raise Broken(str(self._fault))
            claimed = await self._claim()
            if not claimed:
                await self.bell.wait("tickets", "version", "control", "room", timeout=IDLE_S)
        await self.drain()

    async def _claim(self) -> int:
        room = self.config.generator.max_concurrent_groups - len(self.rollouts)
        if room <= 0 or self.why_idle():
            return 0
        self._scan, claims = await self.store.claim(
            self.name, self.engine.version, self.config.generator.lease_s, room, self._scan, self._adopt,
            self.config.generator.max_expiries,
        )  # fmt: skip
        self._adopt = False
        for claim in claims:
            await self._start(claim)
        return len(claims)

    async def _start(self, claim: Claim) -> None:
        fault = "its bytes are not a ticket" if claim.ticket is None else self._unfit(claim.ticket)
        if fault or claim.ticket is None:
            await self.store.fail(self.name, claim, fault, max_attempts=1)
            return
        if held := self.rollouts.pop(claim.entry, None):  # our own lease ran out and came back to us
            await self._cancel(held)
        rollout = Rollout(claim, claim.ticket)
        self.rollouts[claim.entry] = rollout
        rollout.task = asyncio.create_task(self._complete(rollout), name=claim.ticket_id)

    def _unfit(self, ticket: Ticket) -> str:
        longest = len(ticket.prompt) + self.config.sampling.max_tokens
        if longest > self.config.model.max_tokens:
            return f"prompt and completion of {longest} tokens exceed model.max_tokens = {self.config.model.max_tokens}"
        if not ticket.prompt or min(ticket.prompt) < 0 or max(ticket.prompt) >= len(self.tokenizer):
            return f"prompt is empty or has token ids outside 0..{len(self.tokenizer) - 1}, the tokenizer's vocabulary"
        return ""

    async def _complete(self, rollout: Rollout) -> None:
        """One ticket from claim to submission; whatever goes wrong becomes a failure with a reason."""
        try:
            if not await self._generate_and_submit(rollout):
                self.metrics.refused.inc()
        except VerifierFailure as failure:
            self.metrics.failures.labels("verifier").inc()
            await self._fail(rollout, str(failure))
        except GenerationFailed as failure:
            self.metrics.failures.labels("generation").inc()
            await self._fail(rollout, str(failure))
        except EngineDead as error:
            self._fault = error  # the main loop ends the process; leases run out, others take over
        except StoreError as error:  # no fault of the ticket: its lease runs out, and it is claimed again
            log.warning("rollout given up for want of Redis", ticket=rollout.ticket.id, error=str(error))
        except Exception as error:  # a ticket must not end the loop; it is retried, then buried with this reason
            self.metrics.failures.labels("other").inc()
            log.warning("rollout failed", ticket=rollout.ticket.id, exc_info=True)
            await self._fail(rollout, f"{type(error).__name__}: {error}")
        finally:
            if self.rollouts.get(rollout.claim.entry) is rollout:
                del self.rollouts[rollout.claim.entry]
            self.bell.ring("room")

    async def _fail(self, rollout: Rollout, reason: str) -> None:
        try:
            buried = await self.store.fail(self.name, rollout.claim, reason, self.config.generator.max_attempts)
        except StoreError as error:  # its lease runs out, and it is claimed again
            log.warning("failure not reported", ticket=rollout.ticket.id, reason=reason, error=str(error))
            return
        if buried:
            log.error("ticket buried", ticket=rollout.ticket.id, reason=reason)

    async def _generate_and_submit(self, rollout: Rollout) -> bool:
        ticket, sampling = rollout.ticket, self.config.sampling
        saved = await self.store.load_partial(ticket.id)
        prefixes = unpack_partial(saved, ticket, sampling.max_tokens)
        rollout.completions = [None] * ticket.group_size

        async def one(sample: int) -> Generated:
            prefix = prefixes[sample]
            if prefix is not None and prefix.finish != "aborted":
                done = prefix
            else:
                done = await self.engine.generate(
                    rollout.request(sample), ticket.prompt, ticket.seed + sample, sampling.max_tokens, prefix
                )
            if done.finish == "aborted":
                raise GenerationFailed(f"the engine stopped completion {sample} before its end")
            rollout.completions[sample] = done
            return done

        tasks = [asyncio.ensure_future(one(sample)) for sample in range(ticket.group_size)]
        try:
            completions = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # those that go on when one has failed
                task.cancel()
        rollout.generating = False
        generated = time.monotonic()
        texts = self.tokenizer.batch_decode([c.tokens.tolist() for c in completions], skip_special_tokens=True)
        scores = await self.verifiers.score(texts, ticket.answer)
        scored = time.monotonic()
        payload = pack_payload(ticket, completions)
        header = make_header(
            ticket, completions, scores, combine(scores, self.config.verifiers),
            payload=rollout.claim.payload, payload_bytes=len(payload), generator=self.name,
            generate_s=generated - rollout.started, score_s=scored - generated,
        )  # fmt: skip
        self.metrics.observe(header)
        rollout.submitting = True
        while True:
            try:
                return await self.store.submit(self.name, rollout.claim, header, payload, self.config.replay.payload_ttl_s)
            except StoreError as error:  # Redis is away or full: what was made is kept as long as nobody else has the ticket
                log.warning("not submitted yet", ticket=ticket.id, error=str(error))
                await asyncio.sleep(SUBMIT_AGAIN_S)

    async def renew(self, loop: Loop) -> None:
        """Renew the leases of everything under way; drop what was lost to another pod."""
        while True:
            held = list(self.rollouts.values())
            if held:
                lost = await self.store.renew(self.name, [rollout.claim for rollout in held])
                for rollout in held:
                    if (
                        rollout.claim.entry in lost
                        and not rollout.submitting
                        and self.rollouts.get(rollout.claim.entry) is rollout
                    ):
                        log.warning("lease lost", ticket=rollout.ticket.id)
                        await self._cancel(rollout)
            loop.progress()
            await asyncio.sleep(self.config.generator.lease_s / LEASE_SHARE)

    async def save_partials(self, loop: Loop) -> None:
        """Save the tokens so far of what has been running for long."""
        period = self.config.generator.partial_every_s
        while True:
            await asyncio.sleep(period)
            for rollout in list(self.rollouts.values()):
                if rollout.generating and time.monotonic() - rollout.started >= period:
                    await self._save_partial(rollout)
            loop.progress()

    async def _save_partial(self, rollout: Rollout) -> None:
        running = self.engine.snapshot([rollout.request(i) for i in range(rollout.ticket.group_size)])
        so_far = [done or running.get(rollout.request(i), NOTHING) for i, done in enumerate(rollout.completions)]
        if any(len(c.tokens) for c in so_far):
            await self.store.save_partial(self.name, rollout.claim, pack_partial(so_far), self.config.replay.payload_ttl_s)

    async def show_gauges(self, loop: Loop) -> None:
        """Tell the fleet and Prometheus how the engine does."""
        before, counted = time.monotonic(), self.engine.gauges().tokens
        while True:
            now, gauges = time.monotonic(), self.engine.gauges()
            rate = (gauges.tokens - counted) / max(now - before, 1e-3)
            before, counted = now, gauges.tokens
            self.service.say(
                gauges={
                    "tokens_per_s": rate, "rollouts": float(len(self.rollouts)), "running": float(gauges.running),
                    "waiting": float(gauges.waiting), "kv_usage": gauges.kv_usage,
                }
            )  # fmt: skip
            self.metrics.version.set(self.engine.version)
            self.metrics.running.set(len(self.rollouts))
            loop.progress()
            await asyncio.sleep(self.config.fleet.heartbeat_s)

    async def drain(self) -> None:
        """Finish what can be finished within `generator.drain_s`; hand the rest back with its tokens so far."""
        self.draining.set()
        self.service.say(phase="draining")
        tasks = [rollout.task for rollout in self.rollouts.values() if rollout.task]
        if tasks and not self.service.view.ended:
            await asyncio.wait(tasks, timeout=self.config.generator.drain_s)
        left = list(self.rollouts.values())
        try:
            for rollout in left:
                if rollout.generating and not self.service.view.ended:
                    await self._save_partial(rollout)
                await self._cancel(rollout)
                await self.store.release(self.name, rollout.claim)
        except StoreError as error:  # a pod must be able to go without Redis: its leases run out
            log.warning("not everything was handed back", error=str(error))
        log.info("drained", handed_back=len(left))

    async def _cancel(self, rollout: Rollout) -> None:
        if rollout.task is not None:
            await end_tasks([rollout.task])
        if self.rollouts.get(rollout.claim.entry) is rollout:
            del self.rollouts[rollout.claim.entry]
