"""Reads one group: where its ticket is now, and its prompt and completions with scores and advantages.

Guarantees: for every ticket ever issued, the answer says where it is or how it ended. A dropped ticket is forgotten only after
10,000 more were dropped. Damaged data is reported in a note, and shown as far as it can be read.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Sequence
from dataclasses import field
from typing import Any, Literal

from services.groups.advantages import Kind
from services.operations.inspection.answer import Answer
from services.operations.inspection.buffer import probability
from services.operations.inspection.completions import (
    MAX_COMPLETIONS,
    Completion,
    completions_of,
    read_completions,
)
from services.operations.inspection.text import Passage, TextReader, notes_on_text, read_passage
from services.protocol import codec
from services.protocol.errors import NotFound
from services.protocol.messages import Header, Ticket
from services.protocol.payloads import Payload
from services.store import Store
from services.store.inspection import TICKET_ID, IssuedTicket, Whereabouts

Place = Literal[
    "waiting", "generating", "finished", "interrupted", "moving", "requeued", "replay", "drawn", "trained", "failed", "dropped"
]


class Holder(Answer):
    """The generator that holds a ticket."""

    consumer: str
    """Name of the pod."""
    fence: int
    """Number of the claim."""
    idle_s: float
    """Seconds since the lease was renewed; after `fleet.ttl_s` and a half, other pods may claim the ticket."""


class PlannedStep(Answer):
    """A step that trains on the group and whose plan is still kept."""

    step: int
    committed: bool
    """Whether the step has been trained."""


class Group(Answer):
    """A group and where it is."""

    group: str
    """Ticket of the group, `<epoch>-<row>`."""
    place: Place
    """Where it is. `waiting`: issued, not yet claimed. `generating`: claimed by a generator. `finished`: generated, not yet
    settled. `interrupted`: by a restore, to be issued again. `moving`: it changed place while it was read. `requeued`: taken from
    the dead letters, to be issued again. `replay`: in the replay table. `drawn`: removed from the table after use, kept for its
    steps. `trained`, `failed`, `dropped`: its outcome."""
    where: str
    """The place, in words."""
    seq: int | None = None
    """Position in the order of issue, from 0."""
    holder: Holder | None = None
    """Generator that holds its claim."""
    attempts: int = 0
    """Failures reported during its generation."""
    expiries: int = 0
    """Leases expired during its generation."""
    outcome: str | None = None
    """How it ended: `trained`, `failed`, `stale`, `evicted` or `filtered:<why>`."""
    ended_at: datetime.datetime | None = None
    """When it was dropped or failed."""
    dead_letter: str | None = None
    """Id of its dead letter."""
    steps: list[PlannedStep] = field(default_factory=list[PlannedStep])
    """Steps that train on it and whose plans are still kept."""
    trained: bool = False
    """Whether it has been trained on."""
    uses: int | None = None
    """Number of steps that have sampled it."""
    weight: float | None = None
    """Sampling weight, while it is in a table with weights."""
    probability: float | None = None
    """Weight divided by the sum of weights, if the sampler uses weights."""
    source: str | None = None
    """Name of the prompt source."""
    generator: str | None = None
    """Pod that generated it."""
    generate_s: float | None = None
    """Seconds from claim to last token."""
    score_s: float | None = None
    """Seconds spent in verifiers."""
    answer: str | None = None
    """Gold answer, while its ticket still exists."""
    prompt: Passage | None = None
    """Prompt; null when its tokens are deleted."""
    size: int = 0
    """Number of completions."""
    offset: int = 0
    """Number of completions before the page."""
    completions: list[Completion] = field(default_factory=list[Completion])
    """Completions of the page."""
    notes: list[str] = field(default_factory=list[str])
    """Notes on missing or damaged data."""


async def inspect_group(
    store: Store, ticket: str, reader: TextReader, kind: Kind | None, offset: int = 0, limit: int = 16
) -> Group:
    """Return a group by its ticket, with `limit` completions. `kind`: how to compute advantages. Raise `NotFound`."""
    if TICKET_ID.fullmatch(ticket) is None:
        raise NotFound(f"{ticket!r} is not a ticket: give <epoch>-<row>, e.g. 0-17")
    found = await store.inspection.whereabouts(ticket)
    if found.outstanding is not None:
        issued = await store.inspection.issued_ticket(ticket)
        if issued is not None:
            return await asyncio.to_thread(_issued, found, issued, reader)
        entry = await store.inspection.unsettled_header(ticket)
        place = _FINISHED if entry else _INTERRUPTED if found.reissue else _MOVING
        about = {"group": ticket, "seq": found.outstanding, **place}
        header, payload = (entry.header, entry.payload) if entry else (None, "")
        notes = [entry.fault] if entry and entry.fault else []
    elif found.record is not None:
        steps = await store.inspection.steps_of(ticket, found.kept_steps) if found.record.uses else []
        about = _settled(found, steps) | {"probability": probability(found.weight, await store.inspection.table_state())}
        header, payload = found.record.header, found.record.payload
        notes = [] if header else ["unreadable header"]
    else:
        return Group(group=ticket, **_ended(found))
    tokens, fault = await _tokens(store, payload) if header else (None, "")
    notes += [fault] if fault else []
    shown = slice(offset, offset + min(limit, MAX_COMPLETIONS))
    return await asyncio.to_thread(_with_tokens, about, header, tokens, notes, reader, kind, shown)


async def _tokens(store: Store, payload: str) -> tuple[Payload | None, str]:
    """Return a payload, or why there is none."""
    try:
        found = await store.inspection.payload(payload) if payload else None
    except codec.CorruptMessage as error:
        return None, f"its tokens are damaged: {error}"
    return found, "" if found else "its tokens are deleted"


_FINISHED = {"place": "finished", "where": "generated, waiting for dataprep to settle it"}
_INTERRUPTED = {"place": "interrupted", "where": "interrupted by a restore, to be issued again"}
_MOVING = {"place": "moving", "where": "changing place: try again"}


def _issued(found: Whereabouts, issued: IssuedTicket, reader: TextReader) -> Group:
    ticket: Ticket | None = issued.ticket
    holder = Holder(consumer=issued.consumer, fence=issued.fence, idle_s=issued.idle_s) if issued.consumer else None
    return Group(
        group=found.ticket,
        place="generating" if holder else "waiting",
        where=f"being generated by {holder.consumer}" if holder else "issued, waiting for a generator",
        seq=found.outstanding,
        holder=holder,
        attempts=issued.attempts,
        expiries=issued.expiries,
        source=ticket.source if ticket else None,
        answer=ticket.answer if ticket else None,
        prompt=read_passage(ticket.prompt, reader) if ticket else None,
        size=ticket.group_size if ticket else 0,
        notes=notes_on_text(reader) if ticket else ["unreadable ticket"],
    )


def _settled(found: Whereabouts, steps: Sequence[int]) -> dict[str, Any]:
    record = found.record
    assert record is not None
    planned = [PlannedStep(step=step, committed=step <= found.committed_step) for step in steps]
    return {
        "group": found.ticket,
        "place": "replay" if found.in_table else "drawn",
        "where": "in the replay table" if found.in_table else "removed from the replay table after use, kept for its steps",
        "steps": planned,
        "trained": found.trained,
        "outcome": "trained" if found.trained else None,
        "uses": record.uses,
        "weight": found.weight,
    }


def _ended(found: Whereabouts) -> dict[str, Any]:
    """Describe a ticket without a group: it is requeued, or has an outcome."""
    if found.requeued:
        return {"place": "requeued", "where": "requeued from the dead letters, to be issued again"}
    if found.trained:
        return {
            "place": "trained",
            "where": "trained; its plan and tokens were deleted after a checkpoint: "
            f"""grpo samples RUN --where "group == '{found.ticket}'" shows them, if they are logged""",
            "trained": True,
            "outcome": "trained",
        }
    if found.drop is None:
        raise NotFound(
            f"unknown ticket {found.ticket}: it was not issued yet, or it was dropped and 10,000 others have been since"
        )
    drop = found.drop
    at = datetime.datetime.fromtimestamp(drop.at_s, datetime.UTC)
    if drop.dead_letter:
        where = f"failed: see dead letter {drop.dead_letter}"
        return {"place": "failed", "where": where, "outcome": drop.outcome, "ended_at": at, "dead_letter": drop.dead_letter}
    return {
        "place": "dropped",
        "where": f"dropped: {_WHY.get(drop.outcome, drop.outcome)}",
        "outcome": drop.outcome,
        "ended_at": at,
    }


_WHY = {
    "stale": "older than admission.max_staleness allows",
    "evicted": "evicted from a full replay table before it was trained",
    "filtered:zero": "every completion has reward 0, so there is nothing to learn from it",
    "filtered:solved": "every completion is solved, with the same reward, so there is nothing to learn from it",
    "filtered:nonzero": "every completion has the same reward, so there is nothing to learn from it",
    "filtered:all_truncated": "every completion reached sampling.max_tokens and is masked",
}


def _with_tokens(
    about: dict[str, Any],
    header: Header | None,
    payload: Payload | None,
    notes: list[str],
    reader: TextReader,
    kind: Kind | None,
    shown: slice,
) -> Group:
    """Return the group with header and tokens, as far as they can be read."""
    if header is None:
        return Group(**about, notes=notes)
    prompt, completions, more = read_completions(header, payload, reader, kind, shown)
    known: dict[str, Any] = {"seq": header.seq, **about}
    return Group(
        **known,
        source=header.source,
        generator=header.generator,
        generate_s=header.generate_s,
        score_s=header.score_s,
        prompt=prompt,
        size=completions_of(header),
        offset=shown.start,
        completions=completions,
        notes=notes + more,
    )
