"""One group: where its ticket is now, and its prompt and completions with what was made of them.

Guarantees: a ticket that was ever issued is found where it is, or the answer says how it ended; after that it is forgotten only
when 10,000 others were dropped since. Bytes that do not fit together are said to be so, and shown as far as they do.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Sequence
from typing import Any, Literal

from services.algorithm.advantages import Kind
from services.operations.inspection import Answer
from services.operations.inspection.buffer import probability
from services.operations.inspection.completions import (
    MAX_COMPLETIONS,
    Completion,
    Passage,
    notes_on_text,
    read_completions,
    read_passage,
)
from services.operations.inspection.text import TextReader
from services.protocol.errors import NotFound
from services.protocol.messages import Header, Payload, Ticket
from services.store import Store
from services.store.inspection_records import TICKET_ID, IssuedTicket, Whereabouts

Place = Literal["waiting", "generating", "finished", "moving", "requeued", "replay", "drawn", "trained", "failed", "dropped"]


class Holder(Answer):
    """The generator that holds a ticket."""

    consumer: str
    """Pod."""
    fence: int
    """Number of the claim."""
    idle_s: float
    """Since the lease was last renewed; past `generator.lease_s` others may claim the ticket."""


class PlannedStep(Answer):
    """A kept step that trains on the group."""

    step: int
    committed: bool
    """Whether it was trained."""


class Group(Answer):
    """A group and where it is."""

    group: str
    """Its ticket, `<epoch>-<row>`."""
    place: Place
    """Where it is. `waiting`: for a generator. `generating`. `finished`: to be settled. `moving`: changed its place during the
    look. `requeued`: taken from the dead letters, to be issued again. `replay`: in the table. `drawn`: left the table after use,
    kept for its steps. `trained`, `failed`, `dropped`: its outcome."""
    where: str
    """The same as a sentence."""
    seq: int | None = None
    """Place in the order of issue, from 0."""
    holder: Holder | None = None
    """Who generates it."""
    attempts: int = 0
    """Failures reported while it is generated."""
    expiries: int = 0
    """Leases that ran out while it is generated."""
    outcome: str | None = None
    """How it ended: `trained`, `failed`, `stale`, `evicted` or `filtered:<why>`."""
    ended_at: datetime.datetime | None = None
    """When it was dropped or failed."""
    dead_letter: str | None = None
    """Its dead letter."""
    steps: list[PlannedStep] = []
    """Kept steps that train on it."""
    trained: bool = False
    """Whether its prompt was trained."""
    uses: int | None = None
    """Steps that have drawn it."""
    weight: float | None = None
    """Sampling weight, while it is in a table with weights."""
    probability: float | None = None
    """Weight over the sum of weights, where the sampler draws by them."""
    source: str | None = None
    """Name of the prompt source."""
    generator: str | None = None
    """Pod that made it."""
    generate_s: float | None = None
    """Seconds from claim to last token."""
    score_s: float | None = None
    """Seconds that the verifiers took."""
    answer: str | None = None
    """Gold answer, while its ticket is still there."""
    prompt: Passage | None = None
    """The prompt; null when its tokens are gone."""
    size: int = 0
    """Completions there are."""
    offset: int = 0
    """Completions before those shown."""
    completions: list[Completion] = []
    """Those asked for."""
    notes: list[str] = []
    """What is missing or does not fit, and why."""


async def inspect_group(
    store: Store, ticket: str, reader: TextReader, kind: Kind | None, offset: int = 0, limit: int = 16
) -> Group:
    """A group by its ticket, with `limit` of its completions. `kind`: how advantages are computed. Raises `NotFound`."""
    if TICKET_ID.fullmatch(ticket) is None:
        raise NotFound(f"{ticket!r} is not a ticket: they are named <epoch>-<row>, e.g. 0-17")
    found = await store.inspection.whereabouts(ticket)
    if found.outstanding is not None:
        issued = await store.inspection.issued_ticket(ticket)
        if issued is not None:
            return await asyncio.to_thread(_issued, found, issued, reader)
        entry = await store.inspection.unsettled_header(ticket)
        place = {"place": "moving", "where": "was just settled, or handed on: look again"} if entry is None else _FINISHED
        about = {"group": ticket, "seq": found.outstanding, **place}
        header, payload = (entry.header, entry.payload) if entry else (None, "")
        notes = [entry.fault] if entry and entry.fault else []
    elif found.record is not None:
        steps = await store.inspection.steps_of(ticket, found.kept_steps) if found.record.uses else []
        about = _settled(found, steps) | {"probability": probability(found.weight, await store.inspection.table_state())}
        header, payload = found.record.header, found.record.payload
        notes = [] if header else ["its header cannot be read"]
    else:
        return Group(group=ticket, **_ended(found))
    tokens = await store.inspection.payload(payload) if payload else None
    shown = slice(offset, offset + min(limit, MAX_COMPLETIONS))
    return await asyncio.to_thread(_with_tokens, about, header, tokens, notes, reader, kind, shown)


_FINISHED = {"place": "finished", "where": "generated, waits to be settled by dataprep"}


def _issued(found: Whereabouts, issued: IssuedTicket, reader: TextReader) -> Group:
    ticket: Ticket | None = issued.ticket
    holder = Holder(consumer=issued.consumer, fence=issued.fence, idle_s=issued.idle_s) if issued.consumer else None
    return Group(
        group=found.ticket,
        place="generating" if holder else "waiting",
        where=f"being generated by {holder.consumer}" if holder else "issued, waits for a generator",
        seq=found.outstanding,
        holder=holder,
        attempts=issued.attempts,
        expiries=issued.expiries,
        source=ticket.source if ticket else None,
        answer=ticket.answer if ticket else None,
        prompt=read_passage(ticket.prompt, reader) if ticket else None,
        size=ticket.group_size if ticket else 0,
        notes=notes_on_text(reader) if ticket else ["the ticket cannot be read"],
    )


def _settled(found: Whereabouts, steps: Sequence[int]) -> dict[str, Any]:
    record = found.record
    assert record is not None
    planned = [PlannedStep(step=step, committed=step <= found.committed_step) for step in steps]
    return {
        "group": found.ticket,
        "place": "replay" if found.in_table else "drawn",
        "where": "in the replay table" if found.in_table else "left the replay table after use; kept for its steps",
        "steps": planned,
        "trained": found.trained,
        "outcome": "trained" if found.trained else None,
        "uses": record.uses,
        "weight": found.weight,
    }


def _ended(found: Whereabouts) -> dict[str, Any]:
    """A ticket without a group: it waits to be issued again, or has its outcome."""
    if found.requeued:
        return {"place": "requeued", "where": "taken from the dead letters, waits to be issued again"}
    if found.trained:
        return {
            "place": "trained",
            "where": "trained, in a step that a checkpoint covers: plan and tokens are deleted",
            "trained": True,
            "outcome": "trained",
        }
    if found.drop is None:
        raise NotFound(
            f"nothing is known of ticket {found.ticket}: it was not issued yet, or it was dropped and 10,000 others were since"
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
    "filtered:zero": "every completion earned 0, so there is nothing to learn from it",
    "filtered:solved": "every completion earned the largest reward, so there is nothing to learn from it",
    "filtered:nonzero": "every completion earned the same, so there is nothing to learn from it",
    "filtered:all_truncated": "every completion hit sampling.max_tokens and is masked",
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
    """The group with header and tokens, as far as they can be read."""
    if header is None:
        return Group(**about, notes=notes)
    prompt, completions, more = read_completions(header, payload, reader, kind, shown)
    return Group(
        **{"seq": header.seq, **about}, source=header.source, generator=header.generator, generate_s=header.generate_s,
        score_s=header.score_s, prompt=prompt, size=len(header.lengths), offset=shown.start, completions=completions,
        notes=notes + more,
    )  # fmt: skip
