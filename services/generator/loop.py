"""The generator's main loop: claim tickets, have them completed and submitted; hand back what it cannot finish.

Guarantees: those of a holder of tickets (services/runtime/holding.py). In addition, training tickets are claimed only while
the engine holds the published weights and is not kept on them for evaluation, and no more tickets than it can run at once
(concurrency.py); beyond its share of the run's slots a pod claims only tickets that others leave unclaimed. Tickets of an
evaluation round are claimed only while the round holds the pod; when none is left for it or an environment, it returns to
training. A pod reports an operator's pause once it is in effect: no token is sampled (`keep`), or nothing is in progress.
Waits for: tickets, a published version, the end of a pause, room in the engine. Unblocked by: dataprep (`tickets`,
`evaluation`), the trainer (`version`), operators (`control`, `pause`), its own finished groups (`ROOM`), the weight follower,
which stops and starts the engine (`frozen`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from services.generator.concurrency import POLL_S, Bounds, Limit, adjust, fair_share
from services.generator.engines.base import Engine
from services.generator.evaluation import EvaluationDuty
from services.generator.metrics import GeneratorMetrics
from services.generator.serving import Serving, read_request
from services.generator.worker import GroupWorker, RunningGroup
from services.groups.generated import Generated
from services.protocol.errors import RedisFull, StoreError
from services.protocol.payloads import GenerationRequest
from services.runtime.holding import ROOM, TicketHolder
from services.runtime.loops import Loop
from services.runtime.service import Service
from services.verifiers.scoring import Scoring

log = structlog.get_logger()

IDLE_S = 1.0  # the longest delay that a missed notification can cause
PARTIAL_EVERY_S = 5.0
"""Seconds between saves of unfinished completions' tokens, from which another generator continues: the maximum work lost when a
pod dies. A save is a few kilobytes per completion."""
PUBLISHED_S = 1.0  # a rejected caller retries at this pod after this time
SPARE_S = 0.5  # a ticket left unclaimed this long is not wanted by the pods below their share
PROBE_S = 5.0  # between claims while a service that scores does not answer


class GeneratorLoop:
    """Keeps the engine full of claimed tickets."""

    def __init__(self, service: Service, engine: Engine, tokenizer: Any, verifiers: Scoring, metrics: GeneratorMetrics) -> None:
        """`tokenizer` is the model's, as transformers loads it."""
        self.service, self.engine, self.verifiers, self.metrics = service, engine, verifiers, metrics
        self.config, self.notifications = service.config, service.notifications
        self.worker = GroupWorker(service, engine, tokenizer, verifiers, metrics)
        self.tickets = TicketHolder[RunningGroup](service, metrics, self.worker)
        self.evaluation = EvaluationDuty(service, engine)
        self.serving = Serving(self.config, engine, self._unable, self.tickets.engine_died)
        self.draining = asyncio.Event()
        self.bounds = Bounds.of(self.config)
        self.limit = Limit(self.bounds.runnable)
        self._evaluated_at_once = max(1, self.limit.groups * self.bounds.group_size // self.config.evaluation.samples)
        self._spare_from = 0.0
        self._idle = True  # whether the pod could not claim at the last poll
        self._claimed_at = 0.0
        metrics.running.set_function(lambda: self.generating)
        metrics.scoring.set_function(lambda: self.scoring)
        metrics.scoring_limit.set(self.bounds.scoring)
        metrics.evaluating.set_function(lambda: self.evaluating)

    @property
    def generating(self) -> int:
        """Number of training tickets that use the engine."""
        return sum(held.generating for held in self.tickets.of(evaluates=False))

    @property
    def scoring(self) -> int:
        """Number of training tickets whose completions wait for their scores."""
        return len(self.tickets.of(evaluates=False)) - self.generating

    @property
    def weights(self) -> tuple[int, int]:
        """Return what identifies the weights that the engine holds, as in `RunState.published`."""
        return self.service.status.trainer_fence, self.engine.version

    @property
    def evaluating(self) -> bool:
        """Whether the pod is kept on its weights for an evaluation round."""
        return self.evaluation.version is not None

    @property
    def busy(self) -> bool:
        """Whether anything is in progress: tickets, or completions for environments."""
        return bool(self.tickets.held or len(self.serving))

    async def serve(self, body: bytes, gone: Callable[[], asyncio.Future[None]]) -> bytes:
        """Complete an encoded `GenerationRequest` of training or evaluation (`Serving.generate`). Raises `NotServed`."""
        request = read_request(body)
        if request.version is None:
            await self._published()
        return await self.serving.generate(request, gone)

    async def _published(self) -> None:
        """Wait until the weights that the engine holds are published, as they are right after an update, or for PUBLISHED_S."""
        view = self.service.view
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PUBLISHED_S), view.changed:
                await view.changed.wait_for(lambda: view.state is None or view.state.published >= self.weights)

    def why_idle(self) -> str:
        """Return why this pod would start little or no work now, or "" if it would, or is evaluating."""
        return self._obstacle() or ("" if self.evaluating else self.verifiers.waiting)

    def _unable(self, request: GenerationRequest) -> str:
        """Return why this pod cannot complete a request now, or ""."""
        if request.version is not None:
            return self.evaluation.obstacle(request.version)
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
        if self.weights != state.published:
            return f"out of date: has policy version {self.engine.version} of another trainer than the published one"
        return ""

    async def work(self, loop: Loop) -> None:
        """Claim and complete tickets until stopped, then drain."""
        while not (self.service.stopping.is_set() or self.draining.is_set()):
            loop.progress()
            self.tickets.check_engine()
            version = self.evaluation.version
            claimed = await (self.claim() if version is None else self._evaluate(version))
            if not claimed:
                spare = self.generating < self.limit.groups
                topics = ("tickets", "evaluation", "version", "control", ROOM)
                await self.notifications.wait(*topics, timeout=SPARE_S if spare else IDLE_S)
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
        free = self.bounds.scoring - held - self.scoring
        if self.verifiers.waiting:
            return min(1, free) if held == 0 and now >= self._claimed_at + PROBE_S else 0
        within = min(self.limit.groups, share) - held
        if within > 0:
            return min(within, free)
        return min(self.limit.groups - held, share, free) if now >= self._spare_from else 0

    async def claim(self) -> int:
        """Claim training tickets and begin to work on them, as far as there is room; return how many."""
        if self._obstacle():
            self._idle = True
            return 0
        if self._idle:  # let the other pods claim first
            self._idle, self._spare_from = False, time.monotonic() + SPARE_S
        held, room = self.generating, self._room()
        if room <= 0:
            return 0
        claimed = await self.tickets.claim(self.weights, room)
        if held + room > self.share or claimed < room:  # other pods go first, or no ticket is left
            self._spare_from = time.monotonic() + SPARE_S
        if claimed:
            self._claimed_at = time.monotonic()
        return claimed

    async def _evaluate(self, version: int) -> int:
        """Claim as many tickets of the round as fit; return to training when it has no work for this pod or is over."""
        self._idle = True
        if self.service.view.paused:
            return 0
        room = self._evaluated_at_once - len(self.tickets.of(evaluates=True))
        weights = self.service.status.trainer_fence, version
        claimed = await self.tickets.claim(weights, room, evaluates=True) if room > 0 else 0
        if not claimed and not await self.evaluation.goes_on():
            await self.return_to_training()
        return claimed

    async def return_to_training(self) -> None:
        """Give up the evaluation round, and hand back its tickets and the turns of environments."""
        self.evaluation.stop_serving()
        await self._hand_back(self.tickets.of(evaluates=True))
        await self.serving.abort(evaluated=True)  # environments continue them on another volunteer
        await self.evaluation.end()

    async def save_partials(self, loop: Loop) -> None:
        """Save the tokens so far of tickets that have been running for at least one period."""
        while True:
            await asyncio.sleep(PARTIAL_EVERY_S)
            for held in list(self.tickets.held.values()):
                if not (held.kept or held.submitting) and time.monotonic() - held.started >= PARTIAL_EVERY_S:
                    finished = not held.generating
                    await self.worker.save(held, self.worker.so_far(held))
                    held.kept = finished
            loop.progress()

    async def adapt(self, loop: Loop) -> None:
        """Adjust the number of tickets to hold to the engine's load."""
        while True:
            if not self.evaluating:  # while evaluating, the load includes other completions
                before = self.limit.groups
                self.limit = adjust(self.limit, self.engine.gauges(), self.generating, self.bounds)
                if self.limit.groups > before:
                    self.notifications.notify(ROOM)
                elif self.limit.groups < before:
                    await self._give_back(self.generating - self.limit.groups)
            self.metrics.show_limit(self.limit, self.share)
            loop.progress()
            await asyncio.sleep(POLL_S)

    async def _give_back(self, count: int) -> None:
        """Hand back up to `count` tickets that are queued in the engine, newest first, so that another pod may run them."""
        for held in list(reversed(self.tickets.of(evaluates=False)))[: max(0, count)]:
            if held.generating and not self.worker.begun(held):
                await self.tickets.cancel(held)
                if await self.tickets.release(held):
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
            shown = {
                "tokens_per_s": rate,
                "tickets": float(self.generating + self.scoring),
                "running": float(gauges.running),
                "waiting": float(gauges.waiting),
                "kv_usage": gauges.kv_usage,
                "limit": float(self.limit.groups),
                "scoring": float(self.scoring),
            }
            self.service.say(gauges=shown, waiting=self.verifiers.waiting)
            self.metrics.show_versions(self.engine.version, state.published_version if state else -1)
            loop.progress()
            await asyncio.sleep(self.config.fleet.heartbeat_s)

    async def follow_pause(self, loop: Loop, frozen: Callable[[], bool]) -> None:
        """Apply an operator's pauses and report when one is in effect. `frozen` returns whether the engine is kept from sampling.

        Meanwhile no pod claims tickets, since Redis refuses `claim`.
        """
        while True:
            self.service.say(paused=self.service.view.paused and frozen())
            loop.progress()
            await self.notifications.wait("pause", "frozen", timeout=IDLE_S)

    async def drain(self) -> None:
        """Finish what can be finished within `generator.drain_s`; hand back the rest with its tokens so far."""
        self.draining.set()
        self.evaluation.close()
        self.service.say(phase="draining")
        tasks = [held.task for held in self.tickets.held.values() if held.task]
        if tasks and not self.service.view.ended:
            await asyncio.wait(tasks, timeout=self.config.generator.drain_s)
        await self.serving.abort()  # environments continue them on another pod
        left = list(self.tickets.held.values())
        tokens = await self._hand_back(left)
        with contextlib.suppress(StoreError):  # without Redis the pod must still exit; its heartbeats end
            await self.evaluation.end()
        log.info("drained", handed_back=len(left), tokens=tokens)

    async def _hand_back(self, left: Sequence[RunningGroup]) -> int:
        """Stop working on tickets and save their tokens so far for other pods; return how many tokens were saved."""
        ended, tokens = list[tuple[RunningGroup, list[Generated]]](), 0
        for held in left:
            so_far = [] if held.submitting or self.service.view.ended else self.worker.so_far(held)
            await self.tickets.cancel(held)  # before they are saved: tokens sampled meanwhile would be sampled again
            ended.append((held, so_far))
        try:
            for held, so_far in ended:
                saved = 0
                with contextlib.suppress(RedisFull):  # a full Redis still accepts the release
                    saved = await self.worker.save(held, so_far)
                if await self.tickets.release(held, saved):
                    self.metrics.handed_back["drain"].inc()
                    self.metrics.handed_back_tokens.inc(saved)
                    tokens += saved
        except StoreError as error:  # without Redis the pod must still exit; its leases expire
            log.warning("some tickets were not handed back", error=str(error))
        return tokens
