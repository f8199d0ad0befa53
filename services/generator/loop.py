"""The generator's main loop: claim tickets, generate, score, submit; hand back what it cannot finish.

Guarantees: those of a holder of tickets (services/rollouts/holding.py). In addition, training tickets are claimed only while
the engine holds the published weights and is not kept on them for evaluation, and no more tickets than it can run at once
(services/generator/rollouts/concurrency.py); beyond its share of the run's slots a pod claims only tickets that others leave
unclaimed. Waits for: tickets, a published version, the end of a pause, room in the engine. Unblocked by: dataprep (`tickets`),
the trainer (`version`), operators (`control`), its own finished groups (`room`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import structlog

from services.generator.engines.base import Engine
from services.generator.metrics import GeneratorMetrics
from services.generator.rollouts.concurrency import POLL_S, Bounds, Limit, adjust, fair_share
from services.generator.rollouts.evaluation import EvaluationWorker
from services.generator.rollouts.worker import Rollout, RolloutWorker
from services.generator.serving import Serving, read_request
from services.protocol.errors import RedisFull, StoreError
from services.protocol.generation import GenerationRequest
from services.rollouts.generated import Generated, SamplingParameters, Segment
from services.rollouts.holding import MAX_EXPIRIES
from services.rollouts.records import make_header, pack_partial, pack_payload, unpack_partial
from services.runtime.loops import Loop
from services.runtime.service import Service
from services.verifiers.scoring import Scoring

log = structlog.get_logger()

IDLE_S = 1.0  # the longest delay that a missed notification can cause
PARTIAL_EVERY_S = 5.0
"""Seconds between saves of unfinished completions' tokens, from which another generator continues: the maximum work lost when a
pod dies. A save is a few kilobytes per completion."""
PAYLOAD_TTL_S = 3600
"""Seconds after which a payload expires if its header was never committed, and a ticket's tokens so far if no pod continues it.
A header follows its payload in the same request, or within seconds; an hour outlasts a Redis that fails over in between.
"""
PUBLISHED_S = 1.0  # a rejected caller retries at this pod after this time
SPARE_S = 0.5  # a ticket left unclaimed this long is not wanted by the pods below their share
PROBE_S = 5.0  # between claims while a service that scores does not answer
NOTHING = Generated(np.zeros(0, np.int32), np.zeros(0, np.float32), [], "aborted")


class RolloutLoop(RolloutWorker):
    """Keeps the engine full of claimed training tickets."""

    def __init__(
        self,
        service: Service,
        engine: Engine,
        tokenizer: Any,
        verifiers: Scoring,
        metrics: GeneratorMetrics,
        evaluation: EvaluationWorker | None = None,
    ) -> None:
        """`evaluation` is the pod's other worker; while it holds a round, no training ticket is claimed."""
        super().__init__(service, engine, tokenizer, verifiers, metrics, SamplingParameters.training(service.config))
        self.evaluation = evaluation
        self.serving = Serving(self.config, engine, self.sampling, self._unable, self.engine_died)
        self.draining = asyncio.Event()
        self.limit = Limit(Bounds.of(self.config).runnable)
        self._spare_from = 0.0
        self._idle = True  # whether the pod could not claim at the last poll
        self._ready_at: float | None = None  # since when it can claim; None: not yet, or a group was submitted
        self._began = False
        self._claimed_at = 0.0
        self._scan = "0-0"
        self._adopt = True  # until the first tickets, since an earlier process of this pod may have held some
        metrics.running.set_function(lambda: self.generating)
        metrics.scoring.set_function(lambda: len(self.rollouts) - self.generating)
        metrics.scoring_limit.set(Bounds.of(self.config).scoring)
        metrics.evaluating.set_function(lambda: self.evaluating)

    @property
    def evaluating(self) -> bool:
        """Whether the pod is kept on its weights for an evaluation round."""
        return self.evaluation is not None and self.evaluation.version is not None

    @property
    def busy(self) -> bool:
        """Whether anything is in progress: tickets, or completions for environments."""
        return bool(self.rollouts or len(self.serving))

    async def serve(self, body: bytes, gone: Callable[[], asyncio.Future[None]]) -> bytes:
        """Complete an encoded `GenerationRequest` of training or evaluation (`Serving.generate`). Raises `NotServed`."""
        request = read_request(body)
        if request.version is None:
            await self._published()
        serving = self.evaluation.serving if self.evaluation and request.version is not None else self.serving
        return await serving.generate(request, gone)

    async def _published(self) -> None:
        """Wait until the weights that the engine holds are published, as they are right after an update, or for PUBLISHED_S."""
        view = self.service.view
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PUBLISHED_S), view.changed:
                await view.changed.wait_for(lambda: view.state is None or view.state.published >= self.held)

    def why_idle(self) -> str:
        """Return why this pod would start little or no work now, or "" if it would, or is evaluating."""
        return self._obstacle() or ("" if self.evaluating else self.verifiers.waiting)

    def _unable(self, request: GenerationRequest) -> str:
        """Return why this pod cannot complete a request of training now, or ""."""
        if request.version is not None:
            return "does not evaluate"
        return self._obstacle() or ("evaluating" if self.evaluating else "")

    def _obstacle(self) -> str:
        """Return why this pod can start no work now, or ""."""
        state = self.service.view.state
        if self.draining.is_set():
            return "draining"
        if self.service.status.phase in ("starting", "loading"):
            return "loading: the engine and the verifiers are still starting"
        if state is None:
            return "the run does not exist yet"
        if self.service.view.paused:
            return f"paused: {state.paused[self.service.kind]}"
        if self.evaluating:
            return ""
        if self.engine.version < 0:
            return "unsynced: no weights yet; waiting for the trainer's next sync round"
        if not self.engine.whole:
            return "unsynced: an update was applied only in part; waiting for a complete one"
        if self.engine.version != state.published_version:
            return f"out of date: has policy version {self.engine.version}, but {state.published_version} is published"
        if self.held != state.published:
            return f"out of date: has policy version {self.engine.version} of another trainer than the published one"
        return ""

    async def work(self, loop: Loop) -> None:
        """Claim and complete tickets until stopped, then drain."""
        while not (self.service.stopping.is_set() or self.draining.is_set()):
            loop.progress()
            self.check_engine()
            claimed = await self._claim()
            if not claimed:
                spare = self.generating < self.limit.groups
                await self.notifications.wait("tickets", "version", "control", self.room, timeout=SPARE_S if spare else IDLE_S)
        await self.drain()

    @property
    def share(self) -> int:
        """Number of tickets that this pod claims before others have had their share."""
        state = self.service.view.state
        return fair_share(state.slots if state else 1, self.service.claimers)

    def _room(self) -> int:
        """Return how many tickets to claim: up to the pod's share at once, beyond it only tickets unclaimed for `SPARE_S`.

        A finished group frees its place while it is scored, up to a bound. While a scoring service is unavailable, a ticket is
        claimed occasionally, in case the service fails only for the current groups.
        """
        held, share, now = self.generating, self.share, time.monotonic()
        free = Bounds.of(self.config).scoring - len(self.rollouts)
        if self.verifiers.waiting:
            return min(1, free) if held == 0 and now >= self._claimed_at + PROBE_S else 0
        within = min(self.limit.groups, share) - held
        if within > 0:
            return min(within, free)
        return min(self.limit.groups - held, share, free) if now >= self._spare_from else 0

    async def _claim(self) -> int:
        if self.evaluating or self._obstacle():
            self._idle = True
            return 0
        if self._idle:  # let the other pods claim first
            self._idle, self._spare_from = False, time.monotonic() + SPARE_S
        if not self._began:
            self._began, self._ready_at = True, time.monotonic()
        held, room = self.generating, self._room()
        if room <= 0:
            return 0
        asked = time.monotonic()
        self._scan, claims = await self.store.tickets.claim(
            self.name, self.engine.version, self.service.status.trainer_fence, self.config.generator.lease_s, room, self._scan,
            self._adopt, MAX_EXPIRIES,
        )  # fmt: skip
        self._adopt = self._adopt and not claims  # a claim that is refused adopts nothing
        if held + room > self.share or len(claims) < room:  # other pods go first, or no ticket is left
            self._spare_from = time.monotonic() + SPARE_S
        self.metrics.claimed.inc(len(claims))
        if claims:
            self._claimed_at = time.monotonic()
        for claim in claims:
            if claim.ticket is not None:
                self.service.tracing.record("claim", claim.ticket.trace, asked, generator=self.name, fence=claim.fence)
            await self.start(claim)
        return len(claims)

    async def generate(self, request_id: str, prompt: list[int], seed: int, prefix: Generated | None) -> Generated:
        """Generate one completion, across changes of weights."""
        return await self.engine.generate(request_id, prompt, seed, self.sampling, prefix)

    async def submit(self, rollout: Rollout) -> bool:
        """Generate, score and submit a ticket, continuing from the tokens that an earlier holder saved."""
        ticket = rollout.ticket
        saved = await self.store.tickets.load_partial(ticket.id)
        begun = unpack_partial(saved, ticket, self.sampling.max_tokens, self.engine.vocabulary)
        done = await self.complete(rollout, begun)
        segments = [[Segment(completion)] for completion in done.completions]
        payload = pack_payload(ticket, segments, done.notes)
        header = make_header(
            ticket, segments, done.scores, done.rewards, done.solved,
            payload=rollout.claim.payload, payload_bytes=len(payload), generator=self.name,
            generate_s=done.generate_s, score_s=done.score_s,
        )  # fmt: skip
        self.metrics.observe(header)
        accepted = await self.submit_with_retry(
            rollout, lambda: self.store.tickets.submit(self.name, rollout.claim, header, payload, PAYLOAD_TTL_S)
        )
        if accepted and self._ready_at is not None:
            log.info("first group submitted", since_ready_s=round(time.monotonic() - self._ready_at, 3))
            self._ready_at = None
        return accepted

    async def save_partials(self, loop: Loop) -> None:
        """Save the tokens so far of tickets that have been running for at least one period."""
        while True:
            await asyncio.sleep(PARTIAL_EVERY_S)
            for rollout in list(self.rollouts.values()):
                if not (rollout.kept or rollout.submitting) and time.monotonic() - rollout.started >= PARTIAL_EVERY_S:
                    finished = not rollout.generating
                    await self._save_partial(rollout, self._so_far(rollout))
                    rollout.kept = finished
            loop.progress()

    async def keep_tokens(self, rollout: Rollout) -> None:
        """Save the tokens of a ticket whose completions are finished but not scored."""
        if not (rollout.generating or rollout.submitting):
            await self._save_partial(rollout, self._so_far(rollout))

    def _so_far(self, rollout: Rollout) -> list[Generated]:
        """Return the tokens so far of each completion of a ticket."""
        running = self.engine.snapshot([rollout.request(i) for i in range(rollout.ticket.group_size)])
        return [done or running.get(rollout.request(i), NOTHING) for i, done in enumerate(rollout.completions)]

    async def _save_partial(self, rollout: Rollout, so_far: list[Generated]) -> int:
        """Save the tokens so far of a ticket and return how many there are."""
        tokens = sum(len(completion.tokens) for completion in so_far)
        if tokens:
            await self.store.tickets.save_partial(self.name, rollout.claim, pack_partial(so_far), PAYLOAD_TTL_S)
        return tokens

    async def adapt(self, loop: Loop) -> None:
        """Adjust the number of tickets to hold to the engine's load."""
        bounds = Bounds.of(self.config)
        while True:
            if not self.evaluating:  # while evaluating, the load includes other completions
                before = self.limit.groups
                self.limit = adjust(self.limit, self.engine.gauges(), self.generating, bounds)
                if self.limit.groups > before:
                    self.notifications.notify(self.room)
                elif self.limit.groups < before:
                    await self._give_back(self.generating - self.limit.groups)
            self.metrics.show_limit(self.limit, self.share)
            loop.progress()
            await asyncio.sleep(POLL_S)

    async def _give_back(self, count: int) -> None:
        """Hand back up to `count` tickets that are queued in the engine, newest first, so that another pod may run them."""
        running = self.engine.snapshot()
        for rollout in list(reversed(self.rollouts.values()))[: max(0, count)]:
            begun = any(
                done is not None or len(running.get(rollout.request(sample), NOTHING).tokens)
                for sample, done in enumerate(rollout.completions)
            )
            if rollout.generating and not begun:
                await self.cancel(rollout)
                if await self.store.tickets.release(self.name, rollout.claim):
                    self.metrics.handed_back["load"].inc()

    async def show_gauges(self, loop: Loop) -> None:
        """Report the engine's load to the fleet and to Prometheus."""
        before, last, worked = time.monotonic(), self.engine.gauges(), self.verifiers.counts
        while True:
            now, gauges, state = time.monotonic(), self.engine.gauges(), self.service.view.state
            rate = (gauges.tokens - last.tokens) / max(now - before, 1e-3)
            self.metrics.show_engine(gauges, last)
            self.metrics.show_verifiers(self.verifiers.counts, worked)
            before, last, worked = now, gauges, self.verifiers.counts
            self.service.say(
                gauges={
                    "tokens_per_s": rate, "rollouts": float(len(self.rollouts)), "running": float(gauges.running),
                    "waiting": float(gauges.waiting), "kv_usage": gauges.kv_usage, "limit": float(self.limit.groups),
                    "scoring": float(len(self.rollouts) - self.generating),
                },
                waiting=self.verifiers.waiting,
            )  # fmt: skip
            self.metrics.show_versions(self.engine.version, state.published_version if state else -1)
            loop.progress()
            await asyncio.sleep(self.config.fleet.heartbeat_s)

    async def drain(self) -> None:
        """Finish what can be finished within `generator.drain_s`, in both workers; hand back the rest with its tokens so far."""
        self.draining.set()
        workers: list[RolloutWorker] = [self]
        if self.evaluation is not None:
            self.evaluation.close()
            workers.append(self.evaluation)
        self.service.say(phase="draining")
        tasks = [rollout.task for worker in workers for rollout in worker.rollouts.values() if rollout.task]
        if tasks and not self.service.view.ended:
            await asyncio.wait(tasks, timeout=self.config.generator.drain_s)
        await self.serving.abort()  # environments continue them on another pod
        left = list(self.rollouts.values())
        tokens = await self._hand_back(left)
        log.info("drained", handed_back=len(left), tokens=tokens)

    async def abort(self) -> None:
        """Hand back tickets being generated, with their tokens so far, and those waiting for an unavailable service. Tickets
        that are otherwise being scored or submitted are completed.
        """
        away = self.verifiers.waiting
        await self.serving.abort()
        if left := [rollout for rollout in self.rollouts.values() if rollout.generating or (away and not rollout.submitting)]:
            log.info("aborted", handed_back=len(left), tokens=await self._hand_back(left))

    async def _hand_back(self, left: Sequence[Rollout]) -> int:
        """Stop working on tickets and save their tokens so far for other pods; return how many tokens were saved."""
        ended, tokens = list[tuple[Rollout, list[Generated]]](), 0
        for rollout in left:
            so_far = [] if rollout.submitting or self.service.view.ended else self._so_far(rollout)
            await self.cancel(rollout)  # before they are saved: tokens sampled meanwhile would be sampled again
            ended.append((rollout, so_far))
        try:
            for rollout, so_far in ended:
                saved = 0
                with contextlib.suppress(RedisFull):  # a full Redis still accepts the release
                    saved = await self._save_partial(rollout, so_far)
                if await self.store.tickets.release(self.name, rollout.claim, saved):
                    self.metrics.handed_back["drain"].inc()
                    self.metrics.handed_back_tokens.inc(saved)
                    tokens += saved
        except StoreError as error:  # without Redis the pod must still exit; its leases expire
            log.warning("some tickets were not handed back", error=str(error))
        return tokens
