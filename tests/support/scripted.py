"""A scripted inference engine for load and determinism: its tokens depend only on the prompt and the seed.

Everything around it is real: Redis, the rounds, its process, and the gloo group that it receives weights over. Options come from
`generator.engine_options`: `token_s` seconds per token (default 0), `vocabulary` a range of token ids to choose from (default
4..99), `max_running` completions at a time, in order of arrival (default: no limit), `hold_file` a file with the last version to
sample with: an engine with later weights samples nothing until the file names a later version or is removed.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from services.config import RunConfig
from services.generator.engines.base import QUEUED_S, Gauges
from services.groups.generated import Generated, SamplingParameters
from services.protocol.messages import Round, Span
from services.weights.receiver import TransferFailed, WeightsChanged

CHUNK = 4  # tokens per simulated engine iteration
HELD_POLL_S = 0.05


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
    """Return the completion of a prompt under a seed, [T] int32 with 1 <= T <= max_tokens."""
    key = hashlib.blake2b(np.array([seed, *prompt], np.int64).tobytes(), digest_size=8).digest()
    random = np.random.default_rng(int.from_bytes(key, "little"))
    return random.integers(low, high, size=int(random.integers(1, max_tokens + 1)), dtype=np.int32)


def scripted_logprobs(tokens: np.ndarray) -> np.ndarray:
    """Return behaviour logprobs, [T] float32, as a function of the tokens."""
    return (-1.0 - (tokens % 7) / 10).astype(np.float32)


class ScriptedEngine:
    """Implements services.generator.engines.base.Engine."""

    def __init__(self) -> None:
        self.version, self.whole, self.world, self.stages = -1, True, 1, True
        self.vocabulary = 1 << 18  # more than any tokenizer has
        self.fetched_bytes: int | None = None
        self.go = asyncio.Event()
        self.go.set()
        self._running: dict[str, _Running] = {}
        self._made = 0
        self._waiting: dict[str, float] = {}  # request -> when it began to wait
        self.connection: Any = None
        self._receiver: Any = None
        self.weights: dict[str, Any] = {}  # last applied weights, by name
        self.staged: dict[str, Any] | None = None

    async def start(self, config: RunConfig) -> None:
        options = config.generator.engine_options
        self._config = config
        self._token_s = float(options.get("token_s", 0.0))
        self._places = asyncio.Semaphore(int(options.get("max_running", 1 << 30)))
        self._low, self._high = options.get("vocabulary", (4, 100))
        self._hold_file = Path(options["hold_file"]) if "hold_file" in options else None

    async def generate(
        self, request_id: str, prompt: list[int], seed: int, sampling: SamplingParameters, prefix: Generated | None = None
    ) -> Generated:
        script = self.script(prompt, seed, sampling.max_tokens)
        running = self._running[request_id] = _Running()
        if prefix is not None:
            assert prefix.tokens.tolist() == script[: len(prefix.tokens)], "a prefix of another script"
            running.tokens += prefix.tokens.tolist()
            running.versions += [span.version for span in prefix.spans for _ in range(span.start, span.end)]
        self._waiting[request_id] = time.monotonic()
        try:
            async with self._places:
                del self._waiting[request_id]
                await self._make(running, script)
        finally:
            self._waiting.pop(request_id, None)
            del self._running[request_id]
        if running.aborted:
            return running.result("aborted")
        return running.result("length" if len(script) == sampling.max_tokens else "stop")

    def script(self, prompt: list[int], seed: int, max_tokens: int) -> list[int]:
        """Return the completion of a prompt under a seed."""
        return scripted_tokens(prompt, seed, max_tokens, self._low, self._high).tolist()

    async def _make(self, running: _Running, script: list[int]) -> None:
        while len(running.tokens) < len(script) and not running.aborted:
            await self.go.wait()
            if self._held():
                await asyncio.sleep(HELD_POLL_S)
                continue
            chunk = script[len(running.tokens) : len(running.tokens) + CHUNK]
            await asyncio.sleep(self._token_s * len(chunk))
            await self.go.wait()
            running.tokens += chunk
            running.versions += [self.version] * len(chunk)
            self._made += len(chunk)

    def _held(self) -> bool:
        try:
            return self._hold_file is not None and self.version > int(self._hold_file.read_text())
        except FileNotFoundError:
            return False

    def snapshot(self, request_ids: Iterable[str] | None = None) -> dict[str, Generated]:
        names = self._running if request_ids is None else [name for name in request_ids if name in self._running]
        return {name: self._running[name].result("aborted") for name in names}

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        for name in list(self._running if request_ids is None else request_ids):
            if name in self._running:
                self._running[name].aborted = True

    async def pause(self) -> None:
        self.go.clear()

    async def resume(self) -> None:
        if not self.whole:
            raise TransferFailed("weights are not whole")
        self.go.set()

    async def join(self, round: Round, first_rank: int) -> None:
        import torch

        from services.weights.buckets import BUCKET_BYTES
        from services.weights.transport import Address, make_receiver

        self._receiver = self._receiver or make_receiver(round.backend, torch.device("cpu"))
        host = f"{self._config.weights_place}/{round.host}" if round.backend == "store" else round.host
        address = Address(host, round.port, first_rank, round.world_size, BUCKET_BYTES, self._config.sync.answer_s)
        try:
            self.connection = await asyncio.to_thread(self._receiver.connect, address, first_rank)
        except (RuntimeError, TimeoutError) as error:
            raise TransferFailed(str(error)) from None

    async def stage(self, version: int, limit_s: float | None = None) -> None:
        from services.weights.checksums import WeightChanged
        from services.weights.deadline import Deadline, let_go

        self.staged = None
        if self.connection is None:
            raise TransferFailed("no group")
        deadline = Deadline(limit_s or self._config.sync.deadline_s)
        try:
            self.staged = dict(await asyncio.to_thread(self._receiver.take, self.connection, version, deadline))
            self.fetched_bytes = self._receiver.fetched_bytes
        except WeightChanged as error:
            raise WeightsChanged(error.tensor) from None
        except (RuntimeError, TimeoutError) as error:
            self.connection = None
            let_go(error)
            raise TransferFailed(str(error)) from None

    async def receive(self, version: int) -> None:
        if self.staged is None:
            await self.stage(version)
        assert self.staged is not None
        self.weights = {name: weight.clone() for name, weight in self.staged.items()}
        self.staged, self.version = None, version

    def gauges(self) -> Gauges:
        waiting, now = len(self._waiting), time.monotonic()
        queued = sum(now - since > QUEUED_S for since in self._waiting.values())
        return Gauges(len(self._running) - waiting, waiting, queued, 0.0, self._made)

    async def close(self) -> None:
        await self.abort()
