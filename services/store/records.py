"""Values that the store returns and takes: read from Redis, without a connection to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from services.protocol import codec
from services.protocol.errors import DifferentRun
from services.protocol.messages import PROTOCOL_VERSION, Header, Ticket


class Claim(msgspec.Struct, frozen=True):
    """A ticket under lease. `fence` proves the claim; `ticket` is None if its bytes are corrupt."""

    entry: str
    fence: int
    ticket_id: str
    body: bytes
    ticket: Ticket | None

    @property
    def payload(self) -> str:
        """Return the suffix of the payload key: unique to this claim, so that no late writer can touch another's bytes."""
        return f"{self.ticket_id}.{self.fence}"


class HeaderEntry(msgspec.Struct, frozen=True):
    """An entry of the headers stream; `header` is None if its bytes are corrupt, and `fault` says how."""

    entry: str
    ticket: str
    payload: str
    body: bytes
    header: Header | None
    fault: str = ""


class Settlement(msgspec.Struct, frozen=True):
    """The action for a header: `insert`, `stale`, `filtered:<reason>` or `failed:<reason>`."""

    item: HeaderEntry
    action: str
    oldest: int = 0
    weight: float = 1.0
    """Its sampling weight for the sampler `prioritized`; the lowest is evicted first by `lowest_priority`."""
    variate: float = 1.0
    """Exp(1)-distributed: sets its clock."""
    rate: tuple[int, float, float] | None = None
    """Dataset row, pass rate and the rate that excludes rows (0: none), if the order of later epochs depends on it."""


class PassRate(msgspec.Struct, frozen=True):
    """How well a row is answered, measured by one of its settled groups.

    That is the first issued group that reached `filters.exclude_pass_rate`, or otherwise the last issued one, so the result does
    not depend on the order of settling.
    """

    seq: int
    """Issue sequence of the group."""
    rate: float
    """The share of its completions that are solved."""


class TableRules(msgspec.Struct, frozen=True):
    """Rules of the replay table, fixed for the life of a run (for the vocabulary, see docs/replay.md)."""

    sampler: str = "fifo"
    remover: str = "fifo"
    capacity: int = 100_000
    max_uses: int = 1


class SweptTable(msgspec.Struct, frozen=True):
    """The basis of the leader's decisions: the table and the groups on their way to it, at the same instant."""

    stale: int
    """Groups that this call dropped as stale."""
    size: int
    outstanding: int
    oldest_outstanding: int
    """Issue sequence of the oldest unsettled ticket; -1: none."""
    inserted: int
    drawn: int
    requeued: int
    """Tickets taken from the dead letters that wait to be issued again."""
    uses: dict[int, int]
    """Number of groups in the table by number of uses."""
    gaps: tuple[int, ...]
    """Issue sequences of filtered groups since the last step, beyond those that were passed over."""
    first: tuple[tuple[str, int], ...]
    """Group and issue sequence of those that the sampler would draw, in that order."""
    weights: dict[str, float] = {}
    """Sampling weights of those groups."""
    reissue: int = 0
    """Outstanding tickets that a restore interrupted and that wait to be issued again."""


class BufferedGroup(msgspec.Struct, frozen=True):
    """A group in the replay table."""

    group: str
    uses: int
    header: Header


MOST_GENERATORS = 10_000  # more is a typing error


@dataclass(frozen=True)
class Scale:
    """The desired number of generators of a run, which the launcher of `grpo run` or a cluster's scaler follows."""

    wanted: int | None = None
    """None: not set, so `generator.count` applies."""
    why: str = ""
    most: int | None = None
    """The number that the machine of `grpo run` allows; None: no bound."""
    followed: int | None = None
    """The number on which the request and a cluster's Deployment last agreed; None: no cluster's scaler has seen the run."""
    object: str | None = None
    """Which Deployment `followed` is of, by its uid."""

    def desired(self, scaling: str, count: int | None) -> int | None:
        """Return the desired number, with `fleet.scaling` and `generator.count` of the configuration; None: it is not known, or
        set elsewhere, and an earlier request means nothing.
        """
        if scaling != "request":
            return None
        return count if self.wanted is None else self.wanted

    def refusal(self, replicas: int) -> str:
        """Return why `replicas` is not possible and what to do, or an empty string."""
        if replicas > MOST_GENERATORS:
            return f"generators = {replicas} is more than {MOST_GENERATORS}: request fewer"
        if self.most is None or replicas <= self.most:
            return ""
        return (
            f"generators = {replicas} exceeds the {self.most} that the run's machine allows: request fewer, or, on GPUs, restart "
            'the run with lower trainer.ranks or generator.tensor_parallel, or with sync.backend = "gloo" to share GPUs'
        )


Role = Literal["generator", "dataprep", "trainer"]
ROLES: tuple[Role, ...] = ("generator", "dataprep", "trainer")
"""The services that pause and resume."""


FAILING = "grpo: prompts keep failing: "
"""Prefix of the reason of a pause that dataprep itself requests because one prompt after another fails."""


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
    paused: dict[str, str]  # role -> requester and reason
    stopping: str  # requester and reason, or empty
    finished: str  # how the run ended, or empty
    dataset: str
    config: str
    retired_step: int = -1
    """Last step whose plan and payloads were deleted because a checkpoint covers it."""
    incarnation: int = 0
    """When the run was created, or last restored to a checkpoint, Unix seconds."""
    scale: Scale = Scale()
    trainer_fence: int = 0
    """Fence of the trainer that attached last."""
    published_by: int = 0
    """Fence of the trainer whose weights are published; 0: no weights are, or none since a restore."""
    restoring: int = -1
    """Step to which the run is being restored now; -1: none."""
    restore: int = -1
    """Step to which a restore was requested; -1: none."""
    restore_why: str = ""
    """Requester of that restore, and reason."""
    restored: int = -1
    """Step to which the run was restored last; -1: it never was."""
    restore_failed: str = ""
    """Why the last requested restore failed, after its step; empty if it did not."""
    resumed: str = ""
    """How and why its trainer resumed when it last started."""
    checkpoint: str = ""
    """Requester of a checkpoint and reason, after an id of the request."""
    checkpoint_failed: str = ""
    """Why the last attempt to write a checkpoint failed; empty if it did not."""
    paused_since: dict[str, float] = field(default_factory=dict[str, float])
    """When the pause of each role was requested, Unix seconds by the requester's clock."""
    last_resume: str = ""
    """Requester who resumed paused roles last, and reason."""
    last_resume_at: float = 0.0
    """When that was requested, Unix seconds by the requester's clock."""

    @property
    def published(self) -> tuple[int, int]:
        """Return what identifies the published weights: their trainer's fence, and their version."""
        return self.published_by, self.published_version

    @property
    def ended(self) -> bool:
        """Return whether no more work should be started."""
        return bool(self.stopping or self.finished)

    def restore_fault(self, step: int) -> str:
        """Return why the last requested restore failed, if it was one to `step`; empty: it did not fail."""
        failed, _, why = self.restore_failed.partition(" ")
        return why if failed == str(step) else ""

    @property
    def failing(self) -> str:
        """Return why dataprep paused itself, because one prompt after another failed; empty: it did not."""
        why = self.paused.get("dataprep", "")
        return why.removeprefix(FAILING) if why.startswith(FAILING) else ""


def read_state(run: str, fields: dict[bytes, bytes]) -> RunState | None:
    """Read the run's hash; None if the run was not created yet, even if it was already paused."""
    raw = {key.decode(): value.decode() for key, value in fields.items()}
    if "protocol" not in raw:
        return None
    if int(raw["protocol"]) != PROTOCOL_VERSION:
        raise DifferentRun(
            f"run {run!r} has protocol version {raw['protocol']}, but this program speaks "
            f"{PROTOCOL_VERSION}: use the matching release"
        )
    resumed_at, _, resumed_by = raw.get("last_resume", "").partition(" ")
    pauses = {key.removeprefix("paused:"): value.partition(" ") for key, value in raw.items() if key.startswith("paused:")}
    restore, _, restore_why = raw.get("restore_why", "").partition(" ")
    wanted, _, why = raw.get("scale:generator", "").partition(" ")
    bounds = {name: raw.get(f"{name}:generator") for name in ("most", "followed", "object")}
    derived: dict[str, Any] = {
        "paused": {role: said for role, (_, _, said) in pauses.items()},
        "paused_since": {role: float(since) for role, (since, _, _) in pauses.items() if since},
        "restore_why": restore_why if restore == raw.get("restore") else "",  # another step is an earlier request's
        "last_resume": resumed_by,
        "last_resume_at": float(resumed_at or 0),
        "scale": {"wanted": wanted or None, "why": why, **bounds},
    }
    unset = dict.fromkeys(("leader", "stopping", "finished"), "")
    return msgspec.convert(unset | raw | derived, RunState, strict=False)


def read_claim(entry: bytes, fence: bytes, ticket_id: bytes, body: bytes) -> Claim:
    """Read a claim as the function returns it."""
    name = ticket_id.decode(errors="replace")
    ticket = codec.readable(body, Ticket)
    return Claim(entry.decode(), int(fence), name, body, ticket if ticket and ticket.id == name else None)


def read_header(entry: bytes, fields: list[bytes]) -> HeaderEntry:
    """Read an entry of the headers stream. The generator's header must agree with the fields that the server stored."""
    named = dict(zip(fields[::2], fields[1::2], strict=False))
    body = named.get(b"body", b"")
    ticket, payload = (named.get(name, b"").decode(errors="replace") for name in (b"ticket", b"payload"))
    try:
        header, fault = codec.decode(body, Header), ""
    except codec.CorruptMessage as error:
        header, fault = None, str(error)
    if header and (header.ticket, header.payload) != (ticket, payload):
        its = f"ticket {header.ticket} and payload {header.payload}"
        header, fault = None, f"header names {its}, but its entry names {ticket} and {payload}"
    return HeaderEntry(entry.decode(), ticket, payload, body, header, fault)
