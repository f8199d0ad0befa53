"""Message types that hold tokens, as numpy arrays. Each names its producer and its consumers.

Guarantees: as those of messages.py, whose schema version is theirs too; requests to generators are not part of a run's streams.
"""

from __future__ import annotations

import msgspec
import numpy as np


def _no_tokens() -> np.ndarray:
    return np.zeros(0, np.int32)


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of a group of n rollouts with s segments. Produced by generators, consumed by trainer ranks.

    Completions, one per segment, are concatenated, and so are contexts.
    """

    prompt: np.ndarray  # [P] int32
    lengths: np.ndarray  # [s] int32
    tokens: np.ndarray  # [sum lengths] int32
    logprobs: np.ndarray  # [sum lengths] float32, behaviour logprobs at the sampling temperature
    spans: np.ndarray  # [k, 4] int32: segment, version, start, end
    tool_spans: np.ndarray = msgspec.field(default_factory=lambda: np.zeros((0, 3), np.int32))
    # [k, 3] int32: segment, start, end of tokens that the policy did not sample
    notes: list[str] = []  # [n] JSON: verifier -> what it said besides its score; empty: none said anything
    rollout: np.ndarray = msgspec.field(default_factory=_no_tokens)
    # [s] int32: owner of each segment, ascending; empty: segment i belongs to rollout i
    context_lengths: np.ndarray = msgspec.field(default_factory=_no_tokens)
    # [s] int32: tokens of its own context, 0: it follows the prompt; empty: all do
    context: np.ndarray = msgspec.field(default_factory=_no_tokens)  # [sum context_lengths] int32, never trained
    turns: np.ndarray = msgspec.field(default_factory=lambda: np.zeros((0, 4), np.float32))
    # [t, 4] float32: segment, first token after the turn, seconds that the policy waited before it, seconds that it took

    @property
    def owners(self) -> np.ndarray:
        """Return the rollout of each segment, [s]."""
        return self.rollout if len(self.rollout) else np.arange(len(self.lengths))

    @property
    def own_contexts(self) -> list[np.ndarray]:
        """Return the tokens of each segment's own context, [s]; empty: it follows the prompt."""
        if not len(self.context_lengths):
            return [self.context] * len(self.lengths)
        return np.split(self.context, np.cumsum(self.context_lengths)[:-1])


class Partial(msgspec.Struct, frozen=True, array_like=True):
    """Tokens so far of a group. Produced by a generator that hands a ticket back, consumed by the next one that claims it."""

    finish: list[str]  # [n] stop | length: that completion is done; empty: it continues
    lengths: np.ndarray  # [n] int32
    tokens: np.ndarray  # [sum lengths] int32
    logprobs: np.ndarray  # [sum lengths] float32
    spans: np.ndarray  # [k, 4] int32: sample, version, start, end
    tool_spans: np.ndarray = msgspec.field(default_factory=lambda: np.zeros((0, 3), np.int32))
    # [k, 3] int32: sample, start, end of tokens that the policy did not sample


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """One call of a rollout and its reply. Produced by environments before a tool runs, consumed by the next holder."""

    segment: int  # which segment of the rollout it extends; the number of segments so far: it opens one
    base: int  # the turn whose messages and reply `messages` follow; -1: none
    context: np.ndarray  # [C] int32, tokens after the segment's last one; of a new segment all of its own, empty: the prompt
    tokens: np.ndarray  # [T] int32, sampled
    logprobs: np.ndarray  # [T] float32, behaviour logprobs of `tokens`
    spans: np.ndarray  # [k, 3] int32: version, start, end within `tokens`
    finish: str  # stop | length
    messages: str  # JSON: the messages that the call adds to those of `base`
    tools: str  # JSON: the tools of the call if it has no base, otherwise empty: they are those of `base`
    reply: str  # JSON: the assistant's message
    waited_s: float = 0.0  # since the rollout's turn before, or since it began
    sampled_s: float = 0.0  # until the policy had replied
    cut: bool = False  # whether a stop string of the request's own ends the message before `tokens` end


class GenerationRequest(msgspec.Struct, frozen=True, array_like=True):
    """Continue a sequence of tokens. Produced by environments, consumed by generators. The reply is a `Partial` of one."""

    id: str  # unique among requests that run at a time; a repeated request has the same
    prompt: np.ndarray  # [P] int32, the whole context
    seed: int
    max_tokens: int  # most tokens to sample, with those of `prefix`
    prefix: bytes = b""  # `Partial` of one completion, to continue; empty: none
    version: int | None = None  # policy version that is evaluated; None: the published one
