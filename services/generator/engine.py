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

from services.protocol.config import ConfigError, RunConfig
from services.protocol.messages import Round, Span


class EngineDead(Exception):
    """The engine cannot go on: the process has to end and be started anew. The message says why."""


class TransferFailed(Exception):
    """This group or transfer failed; the engine lives. Join a group of another epoch and receive a full update."""


class GenerationFailed(Exception):
    """One completion could not be made; the engine lives."""


@dataclass(frozen=True, slots=True)
class Generated:
    """Tokens of one completion, T of them."""

    tokens: np.ndarray  # [T] int32, with the end-of-sequence token if one was sampled
    logprobs: np.ndarray  # [T] float32, of the sampled tokens at the sampling temperature
    spans: list[Span]  # cover [0, T) in order, versions ascending
    finish: Literal["stop", "length", "aborted"]  # aborted: interrupted, can be continued


@dataclass(frozen=True, slots=True)
class Gauges:
    """The engine at this moment."""

    running: int  # completions past their prefill
    waiting: int  # completions before their first token
    kv_usage: float  # 0..1, share of the KV cache
    tokens: int  # tokens sampled since the start


class Engine(Protocol):
    """One inference engine, used by one event loop."""

    @property
    def version(self) -> int:
        """Policy version of the weights held; -1: none received yet."""
        ...

    @property
    def whole(self) -> bool:
        """Whether all weights are of one version. After a broken transfer False: `resume` is refused until a full update."""
        ...

    @property
    def world(self) -> int:
        """Ranks this engine takes in a weight group."""
        ...

    async def start(self, config: RunConfig) -> None:
        """Load the model. Raises `ConfigError` or `EngineDead`."""
        ...

    async def generate(
        self, request_id: str, prompt: list[int], seed: int, max_tokens: int, prefix: Generated | None = None
    ) -> Generated:
        """Complete `prompt` ([P] token ids) with at most `max_tokens` tokens, those of `prefix` included.

        `prefix` is continued, and its tokens, logprobs and spans stand at the front of the result. The same seed gives
        the same tokens. Raises `EngineDead` or `GenerationFailed`; cancelling the call drops the completion.
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

    async def pause(self) -> None:
        """Stop sampling and forget all KV; completions stay and are prefilled anew after `resume`. Raises `TransferFailed`."""
        ...

    async def resume(self) -> None:
        """Sample again. Raises `TransferFailed` if the weights are not whole."""
        ...

    async def join(self, round: Round, first_rank: int) -> None:
        """Enter the weight group of the round's epoch with ranks first_rank … first_rank + world - 1.

        Returns when every rank of the group is connected; sampling goes on meanwhile. Leaves the former group first.
        Raises `TransferFailed` after `sync.join_deadline_s`, or `EngineDead`.
        """
        ...

    async def receive(self, version: int) -> None:
        """Receive and apply one full set of weights, and stamp it `version`. Only while paused and joined.

        Raises `TransferFailed` (see `whole`) after `sync.transfer_deadline_s` or when the group breaks, or `EngineDead`.
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


ENGINES = {"vllm": "services.generator.vllm_engine:VllmEngine"}
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
