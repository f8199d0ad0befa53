"""Handles unfinished completions when new weights are applied, as `sync.in_flight` says.

Guarantees: with `keep` nothing waits, and completions continue under the new weights. With `drain` and `abort` every completion
has a single version: those that do not end in time restart, and none starts between `quiesce` and `resume`.
Waits for: completions to end, at most `sync.drain_deadline_s`. Unblocked by: the engine.
"""

from __future__ import annotations

import asyncio
import contextlib

from services.config import RunConfig
from services.generator.engines.base import Engine
from services.generator.metrics import GeneratorMetrics
from services.rollouts.generated import Generated, SamplingParameters


class InFlight:
    """Stands between whoever wants completions and the engine."""

    def __init__(self, config: RunConfig, engine: Engine, metrics: GeneratorMetrics) -> None:
        self._mode, self._limit_s = config.sync.in_flight, config.sync.drain_deadline_s
        self._engine, self._metrics = engine, metrics
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._running: set[str] = set()
        self._restarting: set[str] = set()  # stopped, and to be restarted

    @property
    def busy(self) -> bool:
        """Return whether the engine has a completion to sample."""
        return bool(self._running)

    async def generate(
        self, request_id: str, prompt: list[int], seed: int, sampling: SamplingParameters, prefix: Generated | None = None
    ) -> Generated:
        """Do as `Engine.generate`; discard a `prefix` of other weights if completions must have a single version."""
        if self._mode == "keep":
            return await self._sampled(request_id, prompt, seed, sampling, prefix)
        while True:
            await self._open.wait()
            if prefix is not None and any(span.version != self._engine.version for span in prefix.spans):
                prefix = self._give_up(prefix)
            try:
                done = await self._sampled(request_id, prompt, seed, sampling, prefix)
            finally:
                stopped = request_id in self._restarting
                self._restarting.discard(request_id)
            if done.finish != "aborted" or not stopped:
                return done
            prefix = self._give_up(done)

    async def quiesce(self, frozen: bool) -> None:
        """Prepare for new weights. `frozen`: the engine is not sampling, so there is nothing to wait for."""
        if self._mode == "keep":
            return
        self._open.clear()
        if self._mode == "drain" and not frozen:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), self._limit_s)
        if self._running:
            self._restarting |= self._running
            await self._engine.abort(list(self._running))

    def resume(self) -> None:
        """Resume after the weights were applied, or after the round proceeded without this pod."""
        self._open.set()

    async def _sampled(
        self, request_id: str, prompt: list[int], seed: int, sampling: SamplingParameters, prefix: Generated | None
    ) -> Generated:
        self._running.add(request_id)
        self._idle.clear()
        try:
            return await self._engine.generate(request_id, prompt, seed, sampling, prefix)
        finally:
            self._running.discard(request_id)
            if not self._running:
                self._idle.set()

    def _give_up(self, done: Generated) -> None:
        self._metrics.discarded_tokens.inc(len(done.tokens))
