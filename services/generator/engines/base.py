"""What the generator loop asks of an inference engine.

Guarantees of every engine: each token comes with the logprob it was sampled with and the policy version that sampled it;
between `pause` and `resume` no token is made; no call waits without a limit; `close` always ends.
An engine of one's own implements `Engine` and is named in `generator.engine`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from services.config import ConfigError, RunConfig
from services.protocol.messages import Span
from services.weights.receiver import WeightReceiver


class GenerationFailed(Exception):
    """One completion could not be made; the engine lives."""


@dataclass(frozen=True, slots=True)
class Generated:
    """Tokens of one completion, T of them."""

    tokens: np.ndarray  # [T] int32, with the end-of-sequence token if one was sampled
    logprobs: np.ndarray  # [T] float32, of the sampled tokens at the sampling temperature
    spans: list[Span]  # cover [0, T) in order, versions ascending
    finish: Literal["stop", "length", "aborted"]  # aborted: interrupted, can be continued
    tool_spans: tuple[tuple[int, int], ...] = ()
    """[start, end) of tokens that the policy did not sample, such as a tool's answer: ascending and apart. They are read by
    the policy and never trained; their logprobs mean nothing."""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How a completion is sampled."""

    max_tokens: int
    temperature: float = 1.0  # 0: the likeliest token each time
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    stop: tuple[str, ...] = ()

    @classmethod
    def training(cls, config: RunConfig) -> SamplingParameters:
        """Those of training completions."""
        sampling = config.sampling
        return cls(sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k, tuple(sampling.stop))

    @classmethod
    def evaluation(cls, config: RunConfig) -> SamplingParameters:
        """Those of evaluation completions, which end at the same stop strings."""
        given, sampling = config.evaluation, config.sampling
        longest = given.max_tokens or sampling.max_tokens
        return cls(longest, given.temperature, given.top_p, given.top_k, tuple(sampling.stop))


QUEUED_S = 0.5
"""Longer than a completion is on its way into an engine that has room for it."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """The engine at this moment."""

    running: int  # completions past their prefill
    waiting: int  # completions before their first token
    queued: int  # of those waiting, the ones that have been for longer than `QUEUED_S`
    kv_usage: float  # 0..1, share of the KV cache
    tokens: int  # tokens sampled since the start


class Engine(WeightReceiver, Protocol):
    """One inference engine, used by one event loop."""

    @property
    def version(self) -> int:
        """Policy version of the weights held; -1: none received yet."""
        ...

    @property
    def world(self) -> int:
        """Ranks this engine takes in a weight group."""
        ...

    async def start(self, config: RunConfig) -> None:
        """Load the model. Raises `ConfigError` or `EngineDead`."""
        ...

    async def generate(
        self, request_id: str, prompt: list[int], seed: int, sampling: SamplingParameters, prefix: Generated | None = None
    ) -> Generated:
        """Complete `prompt` ([P] token ids) with at most `sampling.max_tokens` tokens, those of `prefix` included.

        `prefix` is continued, and its tokens, logprobs and both kinds of spans stand at the front of the result. The same seed
        gives the same tokens. Raises `EngineDead` or `GenerationFailed`; cancelling the call drops the completion.
        """
        ...

    def snapshot(self, request_ids: Iterable[str] | None = None) -> dict[str, Generated]:
        """Tokens so far of running completions (all, or those named), as an abort would return them now."""
        ...

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Stop running completions (all, or those named): each pending `generate` returns what it has as `aborted`.

        Returns when they have.
        """
        ...

    async def leave_group(self) -> None:
        """Let go of the weight group, if any."""
        ...

    def gauges(self) -> Gauges:
        """Load and progress. Cheap enough for every heartbeat."""
        ...

    async def close(self) -> None:
        """End the engine's processes, by force if need be; returns within seconds."""
        ...


ENGINES = {"vllm": "services.generator.engines.vllm:VllmEngine"}
"""Engines with a name of their own; any other is named by its place."""


def make_engine(config: RunConfig) -> Engine:
    """The engine that `generator.engine` names, not started."""
    module, _, name = ENGINES.get(config.generator.engine, config.generator.engine).partition(":")
    try:
        return getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"generator.engine = {config.generator.engine!r} cannot be loaded ({error}): use 'vllm' or 'package.module:Class'"
        ) from None
