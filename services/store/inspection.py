"""Reads a run for people: a page of the replay table, a ticket's whereabouts, the plan of a step.

Guarantees: reads only; values that belong together are read at the same instant; no call costs more than its page, the kept plans
or the tickets in progress; bytes that are not a valid message are a missing value, never an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from services.protocol import codec
from services.protocol.messages import Header, RankPlan, StepPlan, Ticket
from services.protocol.payloads import Payload
from services.store.batching import pieces
from services.store.facet import TOGETHER, Entry, Facet, named
from services.store.records import HeaderEntry, read_claim, read_header
from services.store.step_records import find_record

Sort = Literal["order", "version", "weight"]

TICKET_ID = re.compile(r"[0-9]{1,9}-[0-9]{1,9}", re.ASCII)  # same as in functions/deadletters.lua: rows fit a bitmap


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


class Inspection(Facet):
    """Reads what the other facets write."""

    async def table_state(self) -> TableState:
        """Return the replay table as a whole."""
        keys = self._keys
        raw, size, prepared = await self._redis.at_once(
            ("HGETALL", keys.replay_state), ("ZCARD", keys.replay_order), ("HGET", keys.run, "prepared_step")
        )
        state = {name: value.decode() for name, value in named(raw).items()}
        weighted = state.get("sampler") == "prioritized" or state.get("remover") == "lowest_priority"
        counted = {
            "size": size,
            "weight_sum": state.get("weight_sum", "0") if weighted else None,
            "uses": {int(name[5:]): int(groups) for name, groups in sorted(state.items()) if name.startswith("uses:")},
            "next_step": int(prepared or -1) + 1,
        }
        return msgspec.convert(state | counted, TableState, strict=False)

    async def table_page(self, sort: Sort, offset: int, limit: int, reverse: bool = False) -> list[TableRow]:
        """Return groups `offset` to `offset + limit` of the table, sorted by issue order, oldest version or weight.

        Lowest first, or with `reverse` highest first. A group that leaves meanwhile is omitted.
        """
        keys = self._keys
        key = {"order": keys.replay_order, "version": keys.replay_version, "weight": keys.replay_weight}[sort]
        found = await self._redis.ask(self._redis.client.zrange(key, offset, offset + limit - 1, desc=reverse))
        records = await self.group_records([name.decode() for name in found])
        weights: list[float | None] = []
        if records:
            weights = await self._redis.ask(self._redis.client.zmscore(self._keys.replay_weight, list(records)))
        return [TableRow(record, weight) for record, weight in zip(records.values(), weights, strict=True)]

    async def group_records(self, groups: Sequence[str]) -> dict[str, GroupRecord]:
        """Return settled groups by name, omitting those that are gone."""
        found: dict[str, GroupRecord] = {}
        for names in pieces(groups, TOGETHER):
            rows = await self._redis.send(*[("HMGET", self._keys.group(name), "header", "payload", "uses") for name in names])
            found |= {name: _group(name, *row) for name, row in zip(names, rows, strict=True) if row[0] is not None}
        return found

    async def whereabouts(self, ticket: str) -> Whereabouts:
        """Return everything that names a ticket of the form `<epoch>-<row>` (`TICKET_ID`)."""
        keys, (epoch, row) = self._keys, map(int, ticket.split("-"))
        run, outstanding, reissue, requeued, group, order, weight, trained, drop = await self._redis.at_once(
            ("HMGET", keys.run, "retired_step", "prepared_step", "committed_step"),
            ("ZSCORE", keys.outstanding, ticket),
            ("ZSCORE", keys.reissue, ticket),
            ("ZSCORE", keys.requeued, ticket),
            ("HMGET", keys.group(ticket), "header", "payload", "uses"),
            ("ZSCORE", keys.replay_order, ticket),
            ("ZSCORE", keys.replay_weight, ticket),
            ("GETBIT", keys.trained(epoch), row),
            ("HGET", keys.drops, ticket),
        )
        retired, prepared, committed = (int(value if value is not None else -1) for value in run)
        return Whereabouts(
            ticket=ticket,
            outstanding=None if outstanding is None else int(float(outstanding)),
            reissue=reissue is not None,
            requeued=requeued is not None,
            record=None if group[0] is None else _group(ticket, *group),
            in_table=order is not None,
            weight=None if weight is None else float(weight),
            trained=bool(trained),
            drop=_drop(drop),
            kept_steps=range(retired + 1, prepared + 1),
            committed_step=committed,
        )

    async def steps_of(self, group: str, kept: range) -> list[int]:
        """Return those of the steps `kept` that train on a group."""
        steps: list[int] = []
        for piece in pieces(kept, TOGETHER):
            lists = await self._redis.send(*[("HGET", self._keys.step(step), "groups") for step in piece])
            steps += [step for step, names in zip(piece, lists, strict=True) if group.encode() in (names or b"").split()]
        return steps

    async def issued_ticket(self, ticket: str) -> IssuedTicket | None:
        """Return a ticket that waits for a generator or an environment, or is with one."""
        stream, group = self._keys.tickets, "generators"
        if (found := await self._find(stream, ticket)) is None:
            stream, group = self._keys.rollout_tickets, "environments"
            if (found := await self._find(stream, ticket)) is None:
                return None
        entry, fields = found
        claim, pending, attempts, expiries = await self._redis.at_once(
            ("HGET", self._keys.claims, entry),
            ("XPENDING", stream, group, entry, entry, 1),
            ("HGET", self._keys.attempts, entry),
            ("HGET", self._keys.expiries, entry),
        )
        consumer, _, fence = (claim or b"").decode(errors="replace").rpartition("|")
        claimed = read_claim(entry, fence.encode() or b"0", ticket.encode(), fields.get(b"body", b""))
        idle_s = pending[0][2] / 1000 if pending else 0.0
        return IssuedTicket(claimed.ticket, consumer, claimed.fence, idle_s, int(attempts or 0), int(expiries or 0))

    async def unsettled_header(self, ticket: str) -> HeaderEntry | None:
        """Return the header of a group that was generated and not settled."""
        found = await self._find(self._keys.headers, ticket)
        return found and read_header(found[0], [part for pair in found[1].items() for part in pair])

    async def payload(self, name: str) -> Payload | None:
        """Return a payload, or None if it is deleted. Raises `CorruptMessage` if it is damaged."""
        [raw] = await self._payloads.sealed([name])
        return None if raw is None else codec.decode(codec.unseal(raw), Payload)

    async def kept_step(self, step: int) -> KeptStep | None:
        """Return a step that was prepared and is not retired, complete."""
        raw = await self._redis.ask(self._redis.client.hgetall(self._keys.step(step)))
        plan = codec.readable(raw.get(b"plan"), StepPlan)
        if plan is None:
            return None
        ranks = [codec.readable(raw.get(f"rank:{rank}".encode()), RankPlan) or RankPlan([]) for rank in range(plan.ranks)]
        return KeptStep(plan, frozenset(raw.get(b"fresh", b"").decode().split()), ranks)

    async def retired_step(self) -> int:
        """Return the last step whose plan was deleted because a checkpoint covers it; -1: none."""
        retired = await self._redis.ask(self._redis.client.hget(self._keys.run, "retired_step"))
        return -1 if retired is None else int(retired)

    async def step_record(self, step: int) -> dict[str, float | None] | None:
        """Return the metrics of a step, of the run's last incarnation that trained it; a value that was not a number is None."""
        return await find_record(self._redis, step)

    async def _find(self, stream: str, ticket: str) -> Entry | None:
        """Return the entry of a ticket in a stream that holds at most as many entries as there are slots."""
        async for entries in self._pages(stream):
            for entry in entries:
                if entry[1].get(b"ticket") == ticket.encode():
                    return entry
        return None


def _group(name: str, header: bytes, payload: bytes | None, uses: bytes | None) -> GroupRecord:
    return GroupRecord(name, (payload or b"").decode(errors="replace"), int(uses or 0), codec.readable(header, Header))


def _drop(raw: bytes | None) -> Drop | None:
    """Decode what `remember_drop` stored (functions/prelude.lua)."""
    if raw is None:
        return None
    at_ms, outcome, *dead_letter = raw.decode().split(" ")
    return Drop(outcome, dead_letter[0] if dead_letter else "", int(at_ms) / 1000)
