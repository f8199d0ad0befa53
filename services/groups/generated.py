"""The tokens of a completion, and how to sample it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from services.config import RunConfig
from services.protocol.messages import Span


class TicketFailed(Exception):
    """A ticket cannot be completed; the process still works."""

    cause: Literal["verifier", "generation"] = "generation"
    """The cause, as metrics name it."""
    final = False
    """Whether a retry is useless, so that the ticket goes to the dead letters at once."""


class GenerationFailed(TicketFailed):
    """One completion failed."""


class RolloutFailed(TicketFailed):
    """Too many rollouts of a group have failed permanently for it to be trained on."""

    final = True


@dataclass(frozen=True, slots=True)
class Generated:
    """Tokens of one completion, T of them."""

    tokens: np.ndarray  # [T] int32, with the end-of-sequence token if one was sampled
    logprobs: np.ndarray  # [T] float32, of the sampled tokens at the sampling temperature
    spans: list[Span]  # cover [0, T) in order, versions ascending
    finish: Literal["stop", "length", "aborted"]  # aborted: interrupted, can be continued
    tool_spans: tuple[tuple[int, int], ...] = ()
    """[start, end) of tokens that the policy did not sample, such as a tool's output: ascending and disjoint. The policy reads
    them, but they are never trained on; their logprobs are meaningless."""


class TurnTime(NamedTuple):
    """When a turn of a rollout ended, and how long it took."""

    end: int  # first token of the segment's completion after it
    waited_s: float  # since the rollout's turn before, or since the rollout began: what the environment took
    sampled_s: float  # until the policy had replied


@dataclass(frozen=True, slots=True)
class Segment:
    """A token sequence that only ever grew: a context and the tokens generated after it. A rollout has one or several."""

    completion: Generated
    context: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """[C] int32, the segment's own context tokens, which are never trained on; empty: the prompt of its group."""
    turns: tuple[TurnTime, ...] = ()
    """Its turns in an environment, in order."""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How to sample a completion."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    stop: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: RunConfig, version: int | None) -> SamplingParameters:
        """Return the parameters of completions that evaluate `version`, or of those that are trained on (None).

        Both have the same stop strings.
        """
        given, sampling = config.evaluation, config.sampling
        stop = tuple(sampling.stop)
        if version is None:
            return cls(sampling.max_tokens, sampling.temperature, stop=stop)
        return cls(given.max_tokens or sampling.max_tokens, given.temperature, given.top_p, stop=stop)
