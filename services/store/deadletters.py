"""Dead letters: tickets that failed for good, and how they are requeued (functions/deadletters.lua)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from services.store.batching import pieces
from services.store.facet import TOGETHER, Facet, token


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


class DeadLetterStream(Facet):
    """Reads dead letters and requeues their tickets."""

    async def count(self) -> int:
        """Return the number of dead letters that are kept."""
        return int(await self._redis.ask(self._redis.client.xlen(self._keys.deadletter)))

    async def page(self, count: int = 100, before: str = "") -> list[DeadLetter]:
        """Return the last `count` dead letters, or those before the entry `before`; newest first."""
        end = f"({before}" if before else "+"
        entries = await self._redis.ask(self._redis.client.xrevrange(self._keys.deadletter, end, "-", count))
        return [_read(entry, fields) for entry, fields in entries]

    async def get(self, id: str) -> DeadLetter | None:
        """Return a dead letter by its entry id, `<ms>-<n>`."""
        entries = await self._redis.ask(self._redis.client.xrange(self._keys.deadletter, id, id))
        return _read(*entries[0]) if entries else None

    async def in_a_row(self, since_pause: bool = False) -> list[str]:
        """Return the entries of tickets that failed since the last group that was generated and scored, oldest first.

        `since_pause`: only those that failed since the run was last paused because of that (`pause_failing`).
        """
        marks = ("letter_before", "letter_paused") if since_pause else ("letter_before",)
        (said,) = await self._redis.send(("HMGET", self._keys.run, *marks))
        last = max((entry.decode() for entry in said if entry), key=_place, default="")
        found: list[str] = []
        async for entries in self._pages(self._keys.deadletter, f"({last}" if last else "-"):
            found += [letter.id for letter in (_read(entry, fields) for entry, fields in entries) if letter.failed]
        return found

    async def requeue(self, ids: Sequence[str]) -> list[Requeued]:
        """Remove dead letters from the stream and have their tickets issued again. Safe to repeat.

        A dead letter that was not counted as failed, or whose ticket is now elsewhere, stays; its result has the reason.
        """
        answers: list[Requeued] = []
        for piece in pieces(ids, TOGETHER):
            reply = await self._redis.call("requeue", token(), *piece)
            for i in range(0, len(reply), 4):
                id, ticket, refusal = (part.decode(errors="replace") for part in reply[i : i + 3])
                answers.append(Requeued(id, ticket, refusal, bool(reply[i + 3])))
        return answers


def _place(entry: str) -> tuple[int, int]:
    """Return the place of an entry in its stream."""
    ms, _, number = entry.partition("-")
    return int(ms), int(number)


def _read(entry: bytes, fields: dict[bytes, bytes]) -> DeadLetter:
    ticket, reason = (fields.get(name, b"").decode(errors="replace") for name in (b"ticket", b"reason"))
    return DeadLetter(entry.decode(), ticket, reason, fields.get(b"outcome") == b"failed", fields.get(b"body", b""))
