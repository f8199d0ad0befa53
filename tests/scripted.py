"""A scripted inference engine for load and determinism: its tokens depend on the prompt and the seed alone.

Everything around it is real: Redis, the rounds, the gloo group it receives weights over, its process. Options come from
`generator.engine_options`: `token_s` seconds per token (default 0), `vocabulary` token ids to choose from (default 4..99).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.generator.engine import Gauges, Generated, TransferFailed
from services.protocol.config import RunConfig
from services.protocol.messages import Round, Span

CHUNK = 4  # tokens per simulated engine iteration


@dataclass
class _Running:
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    aborted: bool = False

    def result(self, finish: Any) -> Generated:
        spans: list[Span] = []
        for i, version in enumerate(self.versions):
            if spans and spans[-1].version == version:
                spans[-1] = Span(version, spans[-1].start, i + 1)
            else:
                spans.append(Span(version, i, i + 1))
        tokens = np.array(self.tokens, np.int32)
        return Generated(tokens, scripted_logprobs(tokens), spans, finish)


def scripted_tokens(prompt: list[int], seed: int, max_tokens: int, low: int, high: int) -> np.ndarray:
    """The completion of a prompt under a seed, [T] int32 with 1 <= T <= max_tokens."""
    key = hashlib.blake2b(np.array([seed, *prompt], np.int64).tobytes(), digest_size=8).digest()
    random = np.random.default_rng(int.from_bytes(key, "little"))
    return random.integers(low, high, size=int(random.integers(1, max_tokens + 1)), dtype=np.int32)


def scripted_logprobs(tokens: np.ndarray) -> np.ndarray:
    """Behaviour logprobs [T] float32, a function of the tokens."""
    return (-1.0 - (tokens % 7) / 10).astype(np.float32)


class ScriptedEngine:
    """Implements services.generator.engine.Engine."""

    def __init__(self) -> None:
        self.version, self.whole, self.world = -1, True, 1
        self._go = asyncio.Event()
        self._go.set()
        self._running: dict[str, _Running] = {}
        self._made = 0
        self._connection: Any = None

    async def start(self, config: RunConfig) -> None:
        options = config.generator.engine_options
        self._config = config
        self._token_s = float(options.get("token_s", 0.0))
        self._low, self._high = options.get("vocabulary", (4, 100))

    async def generate(
        self, request_id: str, prompt: list[int], seed: int, max_tokens: int, prefix: Generated | None = None
    ) -> Generated:
        script = scripted_tokens(prompt, seed, max_tokens, self._low, self._high).tolist()
        running = self._running[request_id] = _Running()
        if prefix is not None:
            assert prefix.tokens.tolist() == script[: len(prefix.tokens)], "a prefix of another script"
            running.tokens += prefix.tokens.tolist()
            running.versions += [span.version for span in prefix.spans for _ in range(span.start, span.end)]
        try:
            while len(running.tokens) < len(script) and not running.aborted:
                await self._go.wait()
                chunk = script[len(running.tokens) : len(running.tokens) + CHUNK]
                await asyncio.sleep(self._token_s * len(chunk))
                await self._go.wait()
                running.tokens += chunk
                running.versions += [self.version] * len(chunk)
                self._made += len(chunk)
        finally:
            del self._running[request_id]
        if running.aborted:
            return running.result("aborted")
        return running.result("length" if len(script) == max_tokens else "stop")

    def snapshot(self, request_ids: Iterable[str] | None = None) -> dict[str, Generated]:
        names = self._running if request_ids is None else [name for name in request_ids if name in self._running]
        return {name: self._running[name].result("aborted") for name in names}

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        for name in list(self._running if request_ids is None else request_ids):
            if name in self._running:
                self._running[name].aborted = True

    async def pause(self) -> None:
        self._go.clear()

    async def resume(self) -> None:
        if not self.whole:
            raise TransferFailed("weights are not whole")
        self._go.set()

    async def join(self, round: Round, first_rank: int) -> None:
        from services.runtime import collective

        limit_s = self._config.sync.join_deadline_s

        def connect() -> tuple[Any, Any]:
            store = collective.join_store(round.host, round.port, limit_s)
            group = collective.make_group(store, first_rank, round.world_size, round.host, round.port, limit_s)
            return group, collective.read_manifest(store)

        try:
            self._connection = await asyncio.to_thread(connect)
        except (RuntimeError, TimeoutError) as error:
            raise TransferFailed(str(error)) from None

    async def receive(self, version: int) -> None:
        import torch

        from services.runtime import collective

        if self._connection is None:
            raise TransferFailed("no group")
        group, manifest = self._connection

        def receive() -> None:
            deadline = collective.Deadline(self._config.sync.transfer_deadline_s)
            for bucket in manifest.buckets:
                collective.broadcast(group, torch.empty(bucket.nbytes, dtype=torch.uint8), deadline)

        try:
            await asyncio.to_thread(receive)
        except (RuntimeError, TimeoutError) as error:
            self._connection = None
            raise TransferFailed(str(error)) from None
        self.version = version

    async def leave_group(self) -> None:
        self._connection = None

    def gauges(self) -> Gauges:
        return Gauges(len(self._running), 0, 0.0, self._made)

    async def close(self) -> None:
        await self.abort()
