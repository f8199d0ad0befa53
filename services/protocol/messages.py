"""Message types. Each names its producer and its consumers; `PROTOCOL_VERSION` is the schema version that a run is bound to.

Guarantees: decoding untrusted bytes returns a valid value or raises `codec.CorruptMessage`; nothing is executed.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

PROTOCOL_VERSION = 7
"""Schema version of all messages and of the key layout; stored in the run's hash and checked by every service."""


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """One prompt to complete. Produced by dataprep, consumed by generators."""

    id: str  # "<epoch>-<index>", index = row in the data set
    seq: int  # position in the run's issue order, from 0
    epoch: int
    index: int
    seed: int  # sample i of the group uses seed + i
    prompt: list[int]  # token ids
    answer: str  # gold answer, or the task's entry as JSON (reasoning_gym)
    group_size: int
    source: str  # name of the prompt source; its verifiers score the completions
    trace: str = ""  # trace context (services/runtime/tracing.py); empty: no trace
    row: str = ""  # JSON of `Row`, for verifiers that are given it; empty: none is


class Row(msgspec.Struct, frozen=True):
    """What a verifier of one's own may see of a ticket's data row. Produced by dataprep, consumed by generators."""

    messages: list[dict[str, Any]]  # the prompt as chat messages, with the system prompt
    columns: dict[str, Any]  # fields of the row


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
    scores: dict[str, list[float]]  # verifier, or verifier.part -> [n] unweighted score
    truncated: list[bool]  # [n] hit max_tokens
    oldest: list[int]  # [n] oldest policy version of a token
    newest: list[int]  # [n] newest policy version of a token
    generator: str
    generate_s: float  # claim to last token
    score_s: float  # verifiers
    source: str  # name of the prompt source
    tool_tokens: list[int]  # [n] completion tokens that the policy did not sample; they are never trained
    trace: str = ""  # trace context of its ticket
    solved: list[bool] = []  # [n]; empty: no verifier can tell


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of one completion were sampled by policy version `version`."""

    version: int
    start: int
    end: int


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of a group. Produced by generators, consumed by trainer ranks. Completions are concatenated."""

    prompt: np.ndarray  # [P] int32
    lengths: np.ndarray  # [n] int32
    tokens: np.ndarray  # [sum lengths] int32
    logprobs: np.ndarray  # [sum lengths] float32, behaviour logprobs at the sampling temperature
    spans: np.ndarray  # [k, 4] int32: sample, version, start, end
    tool_spans: np.ndarray = msgspec.field(default_factory=lambda: np.zeros((0, 3), np.int32))
    # [k, 3] int32: sample, start, end of tokens that the policy did not sample
    notes: list[str] = []  # [n] JSON: verifier -> what it said besides its score; empty: none said anything


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One response inside a packed row. Produced by dataprep, consumed by trainer ranks."""

    payload: str
    index: int  # which completion of the group
    advantage: float
    trained_tokens: int  # response tokens in the loss: 0 if masked, otherwise all except tool tokens
    weight: float = 1.0  # importance weight of its group: factor of its tokens' loss
    tokens: int = 0  # of its prompt and completion together, from the header; 0: use the payload's number
    prompt_tokens: int = 0  # of its prompt alone, likewise


class RankPlan(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one rank, in order; a row is one micro-batch. Every rank of a step has the same number, some may be empty."""

    rows: list[list[Sample]]


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """What step `step` trains on. Produced by dataprep, consumed by trainer ranks, which also read their own `RankPlan`."""

    step: int
    groups: list[str]
    fresh_groups: list[str]  # groups that train for the first time: each returns a slot
    ranks: int
    rows_per_rank: int
    mini_batch_rows: list[int]  # rows of each mini-batch, on every rank; sums to rows_per_rank
    denominators: list[float]  # one per mini-batch: tokens, responses or groups in the loss over all ranks, or the constant
    response_tokens: int
    total_tokens: int  # of all responses with their prompts, as if none were shared
    stats: dict[str, float]  # metrics of the data of this step, e.g. reward/train/mean
    row_tokens: int = 0  # token budget of its rows
    traces: list[str] = []  # contexts of its groups that have a trace


class PodStatus(msgspec.Struct, frozen=True):
    """A pod's status, sent with every heartbeat. Produced by every service, consumed by console and trainer."""

    kind: str  # generator | dataprep | trainer | tracker | scaler | web
    name: str  # stable name, e.g. generator-0
    boot: str  # random, new with every process
    host: str
    pid: int
    url: str  # REST endpoint
    phase: str  # starting | loading | unsynced | ready | draining | ...
    version: int  # policy version held; -1: none
    world: int  # ranks this pod takes in a sync group (tensor parallel size); 0: never a member
    gauges: dict[str, float]  # e.g. tokens_per_s, running, waiting
    trainer_fence: int = 0  # fence of the trainer whose weights it holds; 0: none
    unreached: str = ""  # host:port of the trainer that it could not reach; empty: none
    paused: str = (
        ""  # the pause in effect here: keep | drain | abort; empty: it works, or has not completed a requested pause yet
    )
    waiting: str = ""  # the service that its verifiers wait for, and why; empty: none

    @property
    def member(self) -> str:
        """Return the identity of this process in the fleet: a restarted pod is another member."""
        return f"{self.name}:{self.boot}"


class Round(msgspec.Struct, frozen=True):
    """The current weight-sync round. Produced by the trainer, consumed by generators (docs/design.md, section 8)."""

    epoch: int  # names the collective group; never reused after a failure
    version: int  # policy version being sent
    phase: str  # gather | join | pause | transfer | done | failed
    members: dict[str, int]  # member -> first rank in the group; the sender is rank 0
    world_size: int
    backend: str  # gloo | nccl | filesystem
    host: str  # where members meet the sender, from gather on; for filesystem, the group's folder below the run's weights
    port: int  # 0 for filesystem
    attempt: int  # grows with every round opened; acknowledgements name it
    trainer_fence: int  # fence of the trainer: weights of one version are the same only if it is the same too


SYNC_PHASES = ("gather", "join", "pause", "transfer")
"""Phases of a round that its members acknowledge, in order."""
CHANGED = "arrived changed: "
"""Prefix of the detail of a `failed` acknowledgement of the phase transfer, followed by the first weight that changed."""


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
