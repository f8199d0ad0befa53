"""The interface between the generator loop and an inference engine.

Guarantees of every engine: each token comes with the logprob it was sampled with and the policy version that sampled it;
between `pause` and `resume` no token is sampled; every call has a time limit; `close` always returns.
A custom engine implements `Engine` and is named in `generator.engine`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from services.config import ConfigError, RunConfig
from services.groups.generated import Generated, SamplingParameters
from services.weights.receiver import WeightReceiver

QUEUED_S = 0.5
"""Longer than a completion needs to start in an engine that has room for it."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """The current load of an engine."""

    running: int  # completions past their prefill
    waiting: int  # completions before their first token
    queued: int  # of those waiting, the ones that have waited longer than `QUEUED_S`
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
        """Number of ranks that this engine has in a weight group."""
        ...

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model reads and samples, which may be more than its tokenizer has; 0 before `start`."""
        ...

    async def start(self, config: RunConfig) -> None:
        """Load the model. Raises `ConfigError` or `EngineDead`."""
        ...

    async def generate(
        self, request_id: str, prompt: list[int], seed: int, sampling: SamplingParameters, prefix: Generated | None = None
    ) -> Generated:
        """Complete `prompt` ([P] token ids) with at most `sampling.max_tokens` tokens, including those of `prefix`.

        `prefix` is continued; its tokens, logprobs and both kinds of spans come first in the result. The same seed gives the same
        tokens. Raises `EngineDead` or `GenerationFailed`. Cancelling the call drops the completion.
        """
        ...

    def snapshot(self, request_ids: Iterable[str] | None = None) -> dict[str, Generated]:
        """Return the tokens so far of running completions (all, or those named), as an abort would return them now."""
        ...

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Stop running completions (all, or those named). Each pending `generate` returns what it has as `aborted`.

        Returns once they have.
        """
        ...

    def gauges(self) -> Gauges:
        """Return load and progress. Cheap enough to call on every heartbeat."""
        ...

    async def close(self) -> None:
        """End the engine's processes, by force if necessary; return within seconds."""
        ...


ENGINES = {"vllm": "services.generator.engines.vllm:VllmEngine"}
"""Built-in engines by name. Any other is named by its import path."""


def make_engine(config: RunConfig) -> Engine:
    """Return the engine that `generator.engine` names, not started."""
    module, _, name = ENGINES.get(config.generator.engine, config.generator.engine).partition(":")
    try:
        return getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"generator.engine = {config.generator.engine!r} cannot be loaded ({error}): use 'vllm' or 'package.module:Class'"
        ) from None
