"""Message types. Each names its producer and its consumers; `PROTOCOL_VERSION` is the schema version that a run is bound to.

The messages that hold tokens are in payloads.py.

Guarantees: decoding untrusted bytes returns a valid value or raises `codec.CorruptMessage`; nothing is executed.
"""

from __future__ import annotations

from typing import Any

import msgspec

PROTOCOL_VERSION = 11
"""Schema version of all messages and of the key layout; stored in the run's hash and checked by every service."""


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """One prompt to complete. Produced by dataprep, consumed by generators."""

    id: str  # "<epoch>-<index>", index = row in the data set; of an evaluation "<source>:<index>"
    seq: int  # position in the run's issue order, from 0
    epoch: int
    index: int
    seed: int  # sample i of the group uses seed + i
    prompt: list[int]  # token ids
    answer: str  # gold answer, or the task's entry as JSON (reasoning_gym)
    group_size: int
    source: str  # name of the prompt source; its verifiers score the completions
    trace: str = ""  # trace context (services/runtime/tracing); empty: no trace
    row: str = ""  # JSON of `Row`, for verifiers that are given it; empty: none is
    version: int | None = None  # policy version that samples it alone, to evaluate it; None: to train on, by what is published


class Row(msgspec.Struct, frozen=True):
    """The part of a ticket's data row that custom verifiers may see. Produced by dataprep, consumed by generators."""

    messages: list[dict[str, Any]]  # the prompt as chat messages, with the system prompt
    columns: dict[str, Any]  # fields of the row


class Header(msgspec.Struct, frozen=True, array_like=True):
    """A finished group without its tokens. Produced by generators, consumed by dataprep. n = its rollouts, s = their segments.

    A rollout whose history was never rewritten has one segment.
    """

    ticket: str
    seq: int
    epoch: int
    index: int
    payload: str  # suffix of the payload key, "<ticket>.<fence>"
    payload_bytes: int
    prompt_tokens: int
    lengths: list[int]  # [s] completion tokens
    rewards: list[float]  # [n] weighted sum of verifier scores
    scores: dict[str, list[float]]  # verifier, or verifier.part -> [n] unweighted score
    truncated: list[bool]  # [n] hit max_tokens, or another limit of its rollout
    oldest: list[int]  # [s] oldest policy version of a token
    newest: list[int]  # [s] newest policy version of a token
    generator: str
    generate_s: float  # claim to last token
    score_s: float  # verifiers
    source: str  # name of the prompt source
    tool_tokens: list[int]  # [s] completion tokens that the policy did not sample; they are never trained
    trace: str = ""  # trace context of its ticket
    solved: list[bool] = []  # [n]; empty: no verifier can tell
    rollout: list[int] = []  # [s] owner of each segment, ascending; empty: segment i belongs to rollout i
    context_tokens: list[int] = []  # [s] tokens of its own context, 0: it follows the prompt; empty: all do
    contexts: list[int] = []  # [s] number of its context: 0 the prompt, others from 1 as they first occur; empty: all 0
    turns: list[int] = []  # [n] turns of the policy; empty: one each
    tool_s: list[float] = []  # [n] seconds that its environment took; empty: none
    tool_calls: list[int] = []  # [n] tools that the policy called; empty: none
    malformed_calls: list[int] = []  # [n] turns whose tool calls could not be parsed; empty: none

    @property
    def owners(self) -> list[int]:
        """Return the rollout of each segment, [s]."""
        return self.rollout or list(range(len(self.lengths)))

    @property
    def context_numbers(self) -> list[int]:
        """Return the number of each segment's context, [s]; equal contexts have equal numbers."""
        return self.contexts or [0] * len(self.lengths)

    @property
    def context_sizes(self) -> list[int]:
        """Return the tokens before each segment's completion, [s]: of its own context or the prompt."""
        return [own or self.prompt_tokens for own in self.context_tokens or [0] * len(self.lengths)]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of one completion were sampled by policy version `version`."""

    version: int
    start: int
    end: int


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One segment inside a packed row. Produced by dataprep, consumed by trainer ranks."""

    payload: str
    index: int  # which segment of the group
    advantage: float  # of its rollout
    trained_tokens: int  # response tokens in the loss: 0 if masked, otherwise all except tool tokens
    weight: float = 1.0  # importance weight of its group: factor of its tokens' loss
    tokens: int = 0  # of its context and completion together, from the header; 0: use the payload's number
    context_tokens: int = 0  # of its context alone, likewise
    rollout: int = -1  # which rollout of the group it belongs to; -1: the one of its index
    context: int = 0  # number of its context in the group (`Header.contexts`)

    @property
    def response(self) -> tuple[str, int]:
        """Return payload and rollout: segments that have both in common are one response."""
        return self.payload, self.index if self.rollout < 0 else self.rollout


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
    denominators: list[float]  # one per mini-batch: tokens, rollouts or groups in the loss over all ranks, or the constant
    response_tokens: int
    total_tokens: int  # of all segments with their contexts, as if none were shared
    stats: dict[str, float]  # metrics of the data of this step, e.g. reward/train/mean
    row_tokens: int = 0  # token budget of its rows
    traces: list[str] = []  # contexts of its groups that have a trace


class PodStatus(msgspec.Struct, frozen=True):
    """A pod's status, sent with every heartbeat. Produced by every service, consumed by console and trainer."""

    kind: str  # generator | environment | dataprep | trainer | tracker | scaler | web
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
    paused: bool = False  # whether a requested pause is in effect here
    waiting: str = ""  # the service that its verifiers wait for, and why; empty: none
    fetching: str = ""  # `<trainer's fence>/<version>`: the oldest version of weights that it still reads from the store
    weights: dict[
        str, float
    ] = {}  # of its last weights. Generator: bytes (from a store), pause_s, catch_ups. Trainer: bytes, share, changed, delta
    draining: str = ""  # who requested that it drains, and why; empty: nobody

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
    backend: str  # gloo | nccl | store
    host: str  # where members meet the sender, from gather on; for store, a folder below the run's weights
    port: int  # 0 for store
    attempt: int  # grows with every round opened; acknowledgements name it
    trainer_fence: int  # fence of the trainer: weights of one version are the same only if it is the same too


SYNC_PHASES = ("gather", "join", "pause", "transfer")
"""Phases of a round that its members acknowledge, in order."""
CHANGED = "corrupted in transfer: "
"""Prefix of the detail of a `failed` acknowledgement of the phase transfer, followed by the first weight that changed."""
