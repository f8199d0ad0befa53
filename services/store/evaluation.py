"""Evaluation rounds (functions/evaluation.lua)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec

from services.protocol import codec
from services.protocol.messages import Ticket
from services.store.facet import Facet
from services.store.step_records import INCARNATION, begun


@dataclass(frozen=True)
class EvaluationRound:
    """An open round."""

    version: int
    total: int
    """Number of tickets in the round."""
    done: int
    """Number of results so far."""
    volunteers: int
    """Number of live generators that stay on the version."""
    started: bool
    """Whether a generator ever volunteered."""
    wall_s: float
    """Seconds from the first volunteer to the last result so far."""
    fault: str
    """Why it can no longer be completed, or an empty string."""


@dataclass(frozen=True)
class EvaluationState:
    """Progress of evaluation."""

    dealt_with: int
    """The last version whose round was opened or skipped; -1: none."""
    abandoned: str
    """The last abandoned round, and why; empty if there is none."""
    round: EvaluationRound | None


class EvaluationCalls(Facet):
    """Calls of the leader, which opens and closes rounds, and of volunteers, whose identity is `PodStatus.member`.

    The tickets of a round are claimed and submitted like those of training (`Tickets`).
    """

    async def open(self, fence: int, version: int, tickets: Sequence[Ticket], environments: Collection[str] = ()) -> bool:
        """Open the round of `version`. `environments` are the sources whose rollouts run in environments.

        Returns False if another is open, or this version was handled before.
        """
        args = ((ticket.id, codec.encode(ticket), int(ticket.source in environments)) for ticket in tickets)
        return bool(await self._redis.call("eval_open", fence, version, *chain(*args)))

    async def skip(self, fence: int, version: int, rounds: int) -> bool:
        """Count `rounds` rounds up to `version` as skipped. Returns False if that was done before."""
        return bool(await self._redis.call("eval_skip", fence, version, rounds))

    async def state(self, ttl_s: float) -> EvaluationState:
        """Return the progress of evaluation; a volunteer silent for `ttl_s` does not count."""
        dealt_with, abandoned, *rest = await self._redis.call("eval_look", int(ttl_s * 1000))
        found = None
        if rest:
            *numbers, fault = rest
            version, total, done, volunteers, started_ms, finished_ms, now_ms = map(int, numbers)
            wall_s = ((finished_ms or now_ms) - started_ms) / 1000 if started_ms else 0.0
            found = EvaluationRound(version, total, done, volunteers, started_ms > 0, wall_s, fault.decode(errors="replace"))
        return EvaluationState(int(dealt_with), abandoned.decode(errors="replace"), found)

    async def volunteer(
        self, member: str, version: int, trainer_fence: int, ttl_s: float, lease_s: float, max_generators: int, min_training: int
    ) -> bool:
        """Offer to stay, or to stay longer, on `version` of the trainer with fence `trainer_fence`, which the member holds.

        Returns True if it is to evaluate, False if it is not, or no longer, a volunteer.
        """
        args = (member, version, trainer_fence, int(ttl_s * 1000), int(lease_s * 1000), max_generators, min_training)
        return bool(await self._redis.call("eval_volunteer", *args))

    async def resign(self, member: str) -> None:
        """Stop staying on the version."""
        await self._redis.call("eval_resign", member)

    async def results(self) -> dict[str, bytes]:
        """Return the encoded headers of the open round by ticket."""
        found = await self._redis.ask(self._redis.client.hgetall(self._keys.evaluation("results")))
        return {ticket.decode(errors="replace"): header for ticket, header in found.items()}

    async def report(self, fence: int, version: int, record: dict[str, float]) -> bool:
        """End a complete round: store its record and delete its keys. Returns False if it was ended before."""
        return bool(await self._redis.call("eval_close", fence, version, "", msgspec.json.encode(record)))

    async def abandon(self, fence: int, version: int, reason: str) -> bool:
        """End a round without a report and delete its keys. Returns False if it was ended before."""
        return bool(await self._redis.call("eval_close", fence, version, reason, ""))

    async def records(self, after: str = "-", count: int = 1000) -> list[tuple[str, dict[str, float]]]:
        """Return records of complete rounds after an entry id, oldest first."""
        return await self._records(self._keys.evaluations, after, count)

    async def last_record(self) -> dict[str, float]:
        """Return the record of the last complete round that no restore has undone, empty if there is none."""
        restores = await begun(self._redis)
        async for entries in self._pages(self._keys.evaluations, newest_first=True):
            for _, fields in entries:
                record: dict[str, float] = msgspec.json.decode(fields[b"m"])
                version, life = record.get("eval/version", 0.0), record.get(INCARNATION, 0.0)
                if not any(life < later and version > first for later, first in restores.items()):
                    return record
        return {}
