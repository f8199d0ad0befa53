"""Lists dead letters, reads one with its body, and requeues them."""

from __future__ import annotations

import datetime
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from services.operations.inspection.answer import MAX_PAGE, Answer
from services.protocol import codec
from services.protocol.errors import NotFound
from services.protocol.messages import Header, Ticket
from services.store import Store
from services.store.deadletters import DeadLetter, Requeued

ENTRY_ID = re.compile(r"[0-9]{1,19}-[0-9]{1,19}", re.ASCII)
LAST_S = 253_402_300_799  # end of the year 9999: an entry written by another program may have any id


class DeadLetterRow(Answer):
    """A ticket that failed permanently."""

    id: str
    """Id of the stream entry, as `requeue` takes it."""
    at: datetime.datetime
    """Time of the failure, by the clock of Redis."""
    ticket: str
    """Ticket, as its sender wrote it."""
    reason: str
    """Reason for the failure."""
    failed: bool
    """Whether the ledger counts it as failed. False: its ticket was never issued, so it cannot be requeued."""


class DeadLetters(Answer):
    """A page of dead letters, newest first."""

    total: int
    """Number of dead letters kept; beyond about 10,000 the oldest are deleted."""
    letters: list[DeadLetterRow]
    """Dead letters of the page."""
    next: str | None
    """`before` of the next page; null: this is the last page."""


class DeadLetterBody(DeadLetterRow):
    """A dead letter with its body."""

    body_bytes: int
    """Size of the body."""
    kind: str
    """Type of the body: `ticket`, `header` or `bytes`."""
    fields: dict[str, Any] | None
    """Fields of the ticket or header (services/protocol/messages.py); non-finite numbers are null."""
    hex: str | None
    """The body as hexadecimal digits, if it is neither a ticket nor a header."""


class Requeue(Answer):
    """The result of requeueing a dead letter."""

    id: str
    """Id of the stream entry."""
    ticket: str
    """Ticket; empty when there is no such dead letter."""
    why_not: str
    """Why it was not requeued; empty: its ticket will be issued again."""
    before: bool
    """Whether an earlier call, whose response may have been lost, requeued it; known for the last 10,000."""


class RequeueAnswer(Answer):
    """The dead letters that were requeued, and those that were not."""

    requeued: list[Requeue]
    """Dead letters that were requeued, by this call or an earlier one."""
    refused: list[Requeue]
    """Dead letters that were not requeued, with the reason."""


async def inspect_dead_letters(store: Store, limit: int = 20, before: str = "") -> DeadLetters:
    """Return the newest dead letters, or the newest older than the entry `before`. Raise `NotFound` for an invalid id."""
    limit = min(limit, MAX_PAGE)
    letters = await store.dead_letters.page(limit + 1, _entry_id(before) if before else "")
    return DeadLetters(
        total=await store.dead_letters.count(),
        letters=[DeadLetterRow(**_row(letter)) for letter in letters[:limit]],
        next=letters[limit - 1].id if len(letters) > limit else None,
    )


async def inspect_dead_letter(store: Store, id: str) -> DeadLetterBody:
    """Return a dead letter with its body. Raise `NotFound` when there is none."""
    letter = await store.dead_letters.get(_entry_id(id))
    if letter is None:
        raise NotFound(f"there is no dead letter {id}: it was requeued or trimmed")
    kind, fields = _decoded(letter.body)
    hexadecimal = letter.body.hex() if fields is None else None
    return DeadLetterBody(**_row(letter), body_bytes=len(letter.body), kind=kind, fields=fields, hex=hexadecimal)


async def requeue(store: Store, ids: Sequence[str] | None = None, reason: str = "") -> RequeueAnswer:
    """Requeue the dead letters with these `ids` or, without ids, those whose reason contains `reason`."""
    if ids is None:
        ids = [letter.id async for letter in _all(store) if reason in letter.reason]
    answers = await store.dead_letters.requeue(ids)
    return RequeueAnswer(
        requeued=[_requeue(answer) for answer in answers if not answer.refusal],
        refused=[_requeue(answer) for answer in answers if answer.refusal],
    )


async def _all(store: Store) -> AsyncIterator[DeadLetter]:
    letters = await store.dead_letters.page(MAX_PAGE)
    while letters:
        for letter in letters:
            yield letter
        letters = await store.dead_letters.page(MAX_PAGE, letters[-1].id)


def _requeue(answer: Requeued) -> Requeue:
    return Requeue(id=answer.id, ticket=answer.ticket, why_not=answer.refusal, before=answer.before)


def _row(letter: DeadLetter) -> dict[str, Any]:
    at = datetime.datetime.fromtimestamp(min(letter.at_s, LAST_S), datetime.UTC)
    return {"id": letter.id, "at": at, "ticket": letter.ticket, "reason": letter.reason, "failed": letter.failed}


def _entry_id(text: str) -> str:
    if ENTRY_ID.fullmatch(text) is None:
        raise NotFound(f"{text!r} is not the id of a dead letter: give one like 1790000000000-0 from the list of dead letters")
    return text


def _decoded(body: bytes) -> tuple[str, dict[str, Any] | None]:
    """Decode a body as a ticket or a header. At most one of them fits, because their fields differ in type."""
    for kind, type in (("ticket", Ticket), ("header", Header)):
        if message := codec.readable(body, type):
            return kind, msgspec.json.decode(msgspec.json.encode(msgspec.structs.asdict(message)))  # with null for NaN
    return "bytes", None
