"""Results of inspecting a run: values read from Redis for people, on which no decision depends.

Guarantees: bytes that are not a valid message are a missing value here, never an error.
"""

from __future__ import annotations

import re

import msgspec

from services.protocol.messages import Header, RankPlan, StepPlan, Ticket

TICKET_ID = re.compile(r"[0-9]{1,9}-[0-9]{1,9}", re.ASCII)  # same as in functions/deadletters.lua: rows fit a bitmap


class DeadLetter(msgspec.Struct, frozen=True):
    """An entry of the dead-letter stream."""

    id: str
    ticket: str
    reason: str
    failed: bool
    """Whether the ledger counts its ticket as failed; False: the ticket was never issued."""
    body: bytes
    """The ticket or header that failed, or other bytes found in its place."""

    @property
    def at_s(self) -> float:
        """Return its time, in Unix seconds of the server."""
        return int(self.id.partition("-")[0]) / 1000


class Requeued(msgspec.Struct, frozen=True):
    """Result of `requeue` for a dead letter."""

    id: str
    ticket: str
    refusal: str
    """Why it was left unchanged; empty: its ticket was put back, to be issued again."""
    before: bool
    """Whether an earlier call put it back."""


class TableState(msgspec.Struct, frozen=True):
    """The replay table as a whole."""

    size: int
    weight_sum: float | None
    """Sum of weights; None: its groups have no weights."""
    uses: dict[int, int]
    """Times drawn -> groups of the table."""
    next_step: int
    """The step that is prepared next."""
    sampler: str = ""
    remover: str = ""
    capacity: int = 0
    max_uses: int = 0
    inserted: int = 0
    drawn: int = 0


class GroupRecord(msgspec.Struct, frozen=True):
    """What Redis stores of a settled group."""

    group: str
    payload: str
    uses: int
    header: Header | None


class TableRow(msgspec.Struct, frozen=True):
    """A group in the replay table."""

    record: GroupRecord
    weight: float | None


class Drop(msgspec.Struct, frozen=True):
    """How a ticket ended without being trained."""

    outcome: str
    """`stale`, `evicted`, `filtered:<why>` or `failed`."""
    dead_letter: str
    """Its dead letter, if it failed."""
    at_s: float


class Whereabouts(msgspec.Struct, frozen=True):
    """Everything that names a ticket, at the same instant."""

    ticket: str
    outstanding: int | None
    """Issue sequence, while it is issued and not settled."""
    reissue: bool
    """Whether a restore interrupted it, and it was not issued again since."""
    requeued: bool
    record: GroupRecord | None
    in_table: bool
    weight: float | None
    trained: bool
    drop: Drop | None
    kept_steps: range
    """Steps whose plans are kept."""
    committed_step: int


class IssuedTicket(msgspec.Struct, frozen=True):
    """A ticket that is waiting or being generated."""

    ticket: Ticket | None
    consumer: str
    """The consumer that holds it, or empty."""
    fence: int
    idle_s: float
    """Seconds since its lease was last renewed."""
    attempts: int
    """Number of failures reported."""
    expiries: int
    """Number of leases that expired."""


class KeptStep(msgspec.Struct, frozen=True):
    """A step that was prepared and is not retired."""

    plan: StepPlan
    fresh: frozenset[str]
    """Groups that train for the first time."""
    ranks: list[RankPlan]
