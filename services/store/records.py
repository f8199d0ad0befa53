"""What the store hands out and takes: values read from Redis, without a way back to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, cast

from services.protocol import codec
from services.protocol.errors import DifferentRun
from services.protocol.messages import PROTOCOL_VERSION, Header, Ticket


@dataclass(frozen=True)
class Claim:
    """A ticket under lease. `fence` proves the claim; `ticket` is None when its bytes are corrupt."""

    entry: str
    fence: int
    ticket_id: str
    body: bytes
    ticket: Ticket | None

    @property
    def payload(self) -> str:
        """Suffix of the payload key: unique to this claim, so that no late writer can touch another's bytes."""
        return f"{self.ticket_id}.{self.fence}"


@dataclass(frozen=True)
class HeaderEntry:
    """An entry of the headers stream; `header` is None when its bytes are corrupt, `fault` says how."""

    entry: str
    ticket: str
    payload: str
    body: bytes
    header: Header | None
    fault: str = ""


@dataclass(frozen=True)
class Settlement:
    """What becomes of a header: `insert`, `stale`, `filtered:<reason>` or `failed:<reason>`."""

    item: HeaderEntry
    action: str
    oldest: int = 0
    weight: float = 1.0
    """What it is drawn in proportion to, by the sampler `prioritized`; lowest leaves first by `lowest_priority`."""
    variate: float = 0.0
    """Exp(1)-distributed: sets its clock."""
    victim: float = 0.0
    """Uniform in 0..1: who leaves a full table for it, by the remover `uniform`."""
    rate: tuple[int, float, bool] | None = None
    """Dataset row, pass rate and whether that excludes the row, where the order of later epochs depends on it."""


@dataclass(frozen=True)
class PassRate:
    """How well a row is answered: of its settled groups the first issued that reached `filters.exclude_pass_rate`, else the
    last issued, so that it does not depend on the order in which they were settled."""

    seq: int
    """Issue sequence of the group."""
    rate: float
    """Its mean reward over the largest reward of its source."""


@dataclass(frozen=True)
class TableRules:
    """What the replay table is held to; fixed for the life of a run (the vocabulary is docs/replay.md's)."""

    sampler: str = "fifo"
    remover: str = "fifo"
    capacity: int = 100_000
    max_uses: int = 1


@dataclass(frozen=True)
class SweptTable:
    """What the leader decides on: the table and what is on its way to it, in one instant."""

    stale: int
    """Groups this very look dropped as stale."""
    size: int
    outstanding: int
    oldest_outstanding: int
    """Issue sequence of the oldest ticket not settled; -1: there is none."""
    inserted: int
    drawn: int
    requeued: int
    """Tickets taken from the dead letters that wait to be issued again."""
    uses: dict[int, int]
    """Groups in the table by how often they were drawn."""
    gaps: tuple[int, ...]
    """Issue sequences of filtered groups since the last step, beyond those that were passed over."""
    first: tuple[tuple[str, int], ...]
    """Group and issue sequence of those that the sampler would draw, first one first."""
    weights: dict[str, float] = field(default_factory=dict[str, float])
    """Sampling weights of those groups."""
    reissue: int = 0
    """Outstanding tickets that a restore cut off and that wait to be issued again."""
    weight_sum: float = 0.0
    """Sum of the weights in the table; where groups have none, their number."""


@dataclass(frozen=True)
class BufferedGroup:
    """A group in the replay table."""

    group: str
    uses: int
    header: Header


MOST_GENERATORS = 10_000  # more is a slip of the finger


@dataclass(frozen=True)
class Scale:
    """How many generators a run is wanted to have. Whoever starts generators follows it: here the launcher of `grpo run`."""

    wanted: int | None = None
    """None: nobody has said, so `generator.count`."""
    why: str = ""
    most: int | None = None
    """As many as whoever starts them has GPUs for; None: no bound."""
    followed: int | None = None
    """The number that the wish and a cluster's Deployment last agreed on; None: no cluster's scaler has seen the run."""

    def refusal(self, replicas: int) -> str:
        """Why so many cannot be had, and what to do; empty: they can."""
        if replicas > MOST_GENERATORS:
            return f"generators = {replicas} is more than {MOST_GENERATORS}: ask for fewer"
        if self.most is None or replicas <= self.most:
            return ""
        return (
            f"generators = {replicas} are more than the {self.most} that there are GPUs for where the run is at work: ask for "
            'fewer, or start the run anew with lower trainer.ranks or generator.tensor_parallel, or with sync.backend = "gloo" '
            "to share GPUs"
        )


Role = Literal["generator", "dataprep", "trainer"]
ROLES: tuple[Role, ...] = ("generator", "dataprep", "trainer")
"""The services that pause and resume."""

PauseMode = Literal["keep", "drain", "abort"]
"""What a pause does to the requests of generators: `keep` freezes them where they are, `drain` lets them finish, `abort` ends
them and hands their tickets back. Dataprep and trainer come to a halt between two turns or steps, in every mode."""


@dataclass(frozen=True)
class RunState:
    """The run's hash. Steps and versions start at -1: nothing yet."""

    steps: int
    slots: int
    slots_used: int
    cursor: int
    published_version: int
    prepared_step: int
    committed_step: int
    checkpointed_step: int
    leader: str
    paused: dict[str, str]  # role -> who and why
    stopping: str  # who and why, or empty
    finished: str  # how the run ended, or empty
    dataset: str
    config: str
    retired_step: int = -1
    """The last step whose plan and payloads are gone, as a checkpoint covers it."""
    incarnation: int = 0
    """When the run was created, or last taken back to a checkpoint, Unix seconds."""
    scale: Scale = Scale()
    trainer_fence: int = 0
    """Of the trainer that attached last."""
    published_by: int = 0
    """Fence of the trainer whose weights are published; 0: none are, or not since a restore."""
    restoring: int = -1
    """Step to which the run is being taken back just now."""
    restore: int = -1
    """Step to which somebody wants it taken back."""
    resumed: str = ""
    """What its trainer did when it last started, and why."""
    checkpoint: str = ""
    """Who wants a checkpoint now, and why; a name of the wish before it."""
    checkpoint_failed: str = ""
    """Why the last attempt to write a checkpoint failed; empty: it did not."""
    pause_modes: dict[str, PauseMode] = field(default_factory=dict[str, PauseMode])
    """How those roles pause that do."""
    payload_shards: int = 0
    """Over how many shards its payloads are spread; 0: they lie with the index."""

    @property
    def ended(self) -> bool:
        """No more work is to be started."""
        return bool(self.stopping or self.finished)


_NUMBERS = (
    "steps", "slots", "slots_used", "cursor", "published_version", "prepared_step", "committed_step", "checkpointed_step",
    "retired_step", "incarnation",
)  # fmt: skip


def read_state(run: str, fields: dict[bytes, bytes]) -> RunState | None:
    """The run's hash as `RunState`; None when the run was not created yet, though somebody may have paused it already."""
    raw = {key.decode(): value.decode() for key, value in fields.items()}
    if "protocol" not in raw:
        return None
    if int(raw["protocol"]) != PROTOCOL_VERSION:
        raise DifferentRun(
            f"run {run!r} has protocol version {raw['protocol']}, but this program speaks "
            f"{PROTOCOL_VERSION}: use the matching release"
        )
    pauses = {key.removeprefix("paused:"): value.partition(" ") for key, value in raw.items() if key.startswith("paused:")}
    return RunState(
        **{name: int(raw[name]) for name in _NUMBERS},
        trainer_fence=int(raw.get("trainer_fence", "0")),
        published_by=int(raw.get("published_by", "0")),
        restoring=int(raw.get("restoring", "-1")),
        restore=int(raw.get("restore", "-1")),
        payload_shards=int(raw.get("payload_shards", "0")),
        resumed=raw.get("resumed", ""),
        checkpoint=raw.get("checkpoint", ""),
        checkpoint_failed=raw.get("checkpoint_failed", ""),
        leader=raw.get("leader", ""),
        paused={role: why for role, (_, _, why) in pauses.items()},
        pause_modes={role: cast("PauseMode", mode) for role, (mode, _, _) in pauses.items()},
        stopping=raw.get("stopping", ""),
        finished=raw.get("finished", ""),
        scale=_read_scale(raw),
        dataset=raw["dataset"],
        config=raw["config"],
    )


def _read_scale(raw: dict[str, str]) -> Scale:
    wanted, _, why = raw.get("scale:generator", "").partition(" ")
    most, followed = raw.get("most:generator"), raw.get("followed:generator")
    return Scale(
        int(wanted) if wanted else None, why, None if most is None else int(most), None if followed is None else int(followed)
    )


def read_claim(entry: bytes, fence: bytes, ticket_id: bytes, body: bytes) -> Claim:
    """A claim as the function returns it."""
    name = ticket_id.decode(errors="replace")
    try:
        ticket = codec.decode(body, Ticket)
    except codec.CorruptMessage:
        ticket = None
    if ticket is not None and ticket.id != name:
        ticket = None
    return Claim(entry.decode(), int(fence), name, body, ticket)


def read_header(entry: bytes, fields: list[bytes]) -> HeaderEntry:
    """An entry of the headers stream. What the generator wrote must agree with what the server noted beside it."""
    named = dict(zip(fields[::2], fields[1::2], strict=False))
    body = named.get(b"body", b"")
    ticket, payload = (named.get(name, b"").decode(errors="replace") for name in (b"ticket", b"payload"))
    try:
        header, fault = codec.decode(body, Header), ""
        if (header.ticket, header.payload) != (ticket, payload):
            header, fault = (
                None,
                f"header names ticket {header.ticket} and payload {header.payload}, its entry {ticket} and {payload}",
            )
    except codec.CorruptMessage as error:
        header, fault = None, str(error)
    return HeaderEntry(entry.decode(), ticket, payload, body, header, fault)
