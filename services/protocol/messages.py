"""Wire types. Each names who makes it and who reads it; `WIRE` is the schema version that a run is bound to.

Guarantees: decoding untrusted bytes returns a valid value or raises `codec.CorruptMessage`; nothing is executed.
"""

from __future__ import annotations

import msgspec
import numpy as np

WIRE = 1
"""Schema version of all messages and of the key layout; kept in the run's hash and checked by every service."""


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """One prompt to complete. Produced by dataprep, consumed by generators."""

    id: str  # "<epoch>-<index>", index = row in the data set
    seq: int  # position in the run's order of issue, from 0
    epoch: int
    index: int
    seed: int  # sample i of the group uses seed + i
    prompt: list[int]  # token ids
    answer: str  # gold answer, or the task's entry as JSON (reasoning_gym)
    group_size: int


class Header(msgspec.Struct, frozen=True, array_like=True):
    """A finished group without its tokens. Produced by generators, consumed by dataprep. n = group size."""

    ticket: str
    seq: int
    epoch: int
    index: int
    payload: str  # suffix of the payload key, "<ticket>.<fence>"
    payload_bytes: int
    prompt_tokens: int
    lengths: list[int]  # [n] completion tokens
    rewards: list[float]  # [n] weighted sum of verifier scores
    scores: dict[str, list[float]]  # verifier -> [n] unweighted score in 0..1
    truncated: list[bool]  # [n] hit max_tokens
    oldest: list[int]  # [n] oldest policy version of a token
    newest: list[int]  # [n] newest policy version of a token
    generator: str
    generate_s: float  # claim to last token
    score_s: float  # verifiers


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of one completion were sampled by policy version `version`."""

    version: int
    start: int
    end: int


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of a group. Produced by generators, consumed by trainer ranks. Completions lie end to end."""

    prompt: np.ndarray  # [P] int32
    lengths: np.ndarray  # [n] int32
    tokens: np.ndarray  # [sum lengths] int32
    logprobs: np.ndarray  # [sum lengths] float32, behaviour logprobs at the sampling temperature
    spans: np.ndarray  # [k, 4] int32: sample, version, start, end


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One response inside a packed row. Produced by dataprep, consumed by trainer ranks."""

    payload: str
    index: int  # which completion of the group
    advantage: float
    trained_tokens: int  # response tokens in the loss; 0: masked


class RankPlan(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one rank, in order; a row is one micro-batch. Every rank of a step has equally many, some may be empty."""

    rows: list[list[Sample]]


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """What step `step` trains on. Produced by dataprep, consumed by trainer ranks, who read their own `RankPlan` beside it."""

    step: int
    groups: list[str]
    fresh_groups: list[str]  # those that train for the first time: each returns a slot
    ranks: int
    rows_per_rank: int
    mini_batch_rows: list[int]  # rows of each mini-batch, on every rank; sums to rows_per_rank
    denominators: list[float]  # one a mini-batch: response tokens over all ranks, or the constant
    response_tokens: int
    total_tokens: int
    stats: dict[str, float]  # metrics of the data of this step, e.g. reward/train/mean


class PodStatus(msgspec.Struct, frozen=True):
    """What a pod says of itself with every heartbeat. Produced by every service, consumed by console and trainer."""

    kind: str  # generator | dataprep | trainer
    name: str  # stable name, e.g. generator-0
    boot: str  # random, new with every process
    host: str
    pid: int
    url: str  # REST endpoint
    phase: str  # starting | loading | unsynced | ready | draining | ...
    version: int  # policy version held; -1: none
    world: int  # ranks this pod takes in a sync group (tensor parallel size); 0: never a member
    gauges: dict[str, float]  # e.g. tokens_per_s, running, waiting

    @property
    def member(self) -> str:
        """Identity of this process in the fleet: a restarted pod is another member."""
        return f"{self.name}:{self.boot}"


class Round(msgspec.Struct, frozen=True):
    """The current weight-sync round. Produced by the trainer, consumed by generators (docs/design.md, section 8)."""

    epoch: int  # names the collective group; never reused after a failure
    version: int  # policy version being sent
    phase: str  # gather | join | transfer | done | failed
    members: dict[str, int]  # member -> first rank in the group; the sender is rank 0
    world_size: int
    backend: str
    host: str
    port: int
    attempt: int  # grows with every round opened; acknowledgements name it


class Partial(msgspec.Struct, frozen=True, array_like=True):
    """Tokens so far of a group. Produced by a generator that hands a ticket back, consumed by the one that claims it next."""

    finish: list[str]  # [n] stop | length: that completion is done; empty: it is to be continued
    lengths: np.ndarray  # [n] int32
    tokens: np.ndarray  # [sum lengths] int32
    logprobs: np.ndarray  # [sum lengths] float32
    spans: np.ndarray  # [k, 4] int32: sample, version, start, end
