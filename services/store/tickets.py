"""Tickets from issue to submission (functions/tickets.lua)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from services.protocol import codec
from services.protocol.errors import OutOfOrder, StoreError
from services.protocol.messages import Header, Ticket
from services.store.batching import Batcher
from services.store.connection import Connection
from services.store.facet import BOOT, Facet, ordinal
from services.store.payloads import Payloads
from services.store.records import Claim, read_claim

SUBMITTED_TOGETHER = 16  # groups in one request, of some 40 KB each: below 1 MB a request costs no more per group
COMMITTED_TOGETHER = 64  # turns in one request, of some 4 KB each: a request blocks the server for about a millisecond
REQUESTS_UNDER_WAY = 2  # concurrent requests: the server works on one while the client works on the other


class _Submission(NamedTuple):
    """A group being submitted to Redis."""

    payload: str
    sealed: bytes  # empty: its header alone is submitted
    ttl_s: int
    args: tuple[Any, ...]  # of the function that commits it


class TurnPlace(NamedTuple):
    """Where a record belongs in a rollout."""

    sample: int
    restarts: int  # how often the rollout has started again
    place: int  # from 0


class Tickets(Facet):
    """The tickets that dataprep issues and generators claim, renew, hand back and submit."""

    def __init__(self, connection: Connection, payloads: Payloads) -> None:
        super().__init__(connection, payloads)
        self._submissions = Batcher(self._submit, SUBMITTED_TOGETHER, REQUESTS_UNDER_WAY)
        self._commits = Batcher(self._commit_turns, COMMITTED_TOGETHER, REQUESTS_UNDER_WAY)

    async def issue(
        self,
        fence: int,
        cursor: int,
        tickets: Sequence[Ticket],
        order: bytes = b"",
        epochs: Mapping[str, bytes] | None = None,
        requeued: int = 0,
        environments: Collection[str] = (),
    ) -> int:
        """Issue `tickets`, which start at `cursor`, if that many slots are free. Returns how many: all or none.

        `order`: state of the prompt order after them. `epochs`: rows of the epochs that begin with them, by source. The first
        `requeued` of them come from the dead letters. `environments`: sources whose tickets are for environments.
        """
        rows = chain(*(epochs or {}).items())
        args = (fence, cursor, order, requeued, _lanes(tickets, environments), len(epochs or {}))
        return int(await self._redis.call("issue", *args, *rows, *_encoded(tickets)))

    async def order(self) -> tuple[bytes, dict[str, bytes]]:
        """Return the prompt order as `issue` last left it: its state, and the rows of each source's epoch. Empty before the
        first.
        """
        found = await self._redis.ask(self._redis.client.hgetall(self._keys.order))
        raw = {name.decode(): value for name, value in found.items()}
        return raw.pop("state", b""), {name.removeprefix("rows:"): rows for name, rows in raw.items()}

    async def issue_again(self, fence: int, tickets: Sequence[Ticket], environments: Collection[str] = ()) -> int:
        """Issue tickets that a restore interrupted, under their old sequence, as far as the run has slots for them.

        Returns how many were issued now, not before. `environments`: sources whose tickets are for environments.
        """
        return int(await self._redis.call("issue_again", fence, _lanes(tickets, environments), *_encoded(tickets)))

    async def reissue(self, count: int) -> list[tuple[str, int]]:
        """Return the first tickets that a restore interrupted and that were not issued again, with their issue sequence."""
        found = await self._redis.ask(self._redis.client.zrange(self._keys.reissue, 0, count - 1, withscores=True))
        return [(name.decode(), int(seq)) for name, seq in found]

    async def requeued(self, count: int) -> list[str]:
        """Return the first tickets that wait to be issued again."""
        return [name.decode() for name in await self._redis.ask(self._redis.client.zrange(self._keys.requeued, 0, count - 1))]

    async def claim(
        self,
        consumer: str,
        version: int,
        trainer_fence: int,
        lease_s: float,
        count: int,
        scan: str = "0-0",
        adopt: bool = False,
        max_expiries: int = 16,
        rollouts: bool = False,
        evaluates: bool = False,
    ) -> tuple[str, list[Claim]]:
        """Claim up to `count` tickets for a pod that holds `version` of the trainer with fence `trainer_fence`.

        `rollouts`: those for environments; such a pod holds no weights, and names the version that it knows to be published, or
        the one that it evaluates. `evaluates`: those of the open evaluation round.

        Returns the next scan position and the claims.
        """
        wanted = (int(lease_s * 1000), count, scan, int(adopt), max_expiries)
        lane = (int(rollouts), int(evaluates))
        reply = await self._redis.call("claim", consumer, version, trainer_fence, *wanted, BOOT, ordinal(), *lane)
        claims = [read_claim(*reply[i : i + 4]) for i in range(1, len(reply), 4)]
        return reply[0].decode(), claims

    async def fences(self) -> set[str]:
        """Return the fences of all current claims."""
        claims = await self._redis.ask(self._redis.client.hgetall(self._keys.claims))
        return {holder.rpartition(b"|")[2].decode() for holder in claims.values()}

    async def renew(self, consumer: str, claims: Sequence[Claim]) -> set[str]:
        """Renew leases. Returns the entries that are lost."""
        held = chain(*((claim.entry, claim.fence) for claim in claims))
        return {entry.decode() for entry in await self._redis.call("renew", consumer, *held)}

    async def release(self, consumer: str, claim: Claim, tokens: int = 0) -> bool:
        """Hand a ticket back; another pod may claim it at once. `tokens`: how many were saved of it, for the ledger."""
        return bool(await self._redis.call("release", consumer, claim.entry, claim.fence, tokens))

    async def fail(self, consumer: str, claim: Claim, reason: str, max_attempts: int) -> bool:
        """Hand a ticket back after a failure, or after `max_attempts` failures make it a dead letter (returns True).

        A ticket of an evaluation round then ends the round instead.
        """
        args = (consumer, claim.entry, claim.fence, claim.ticket_id, claim.body, max_attempts, reason)
        return int(await self._redis.call("fail", *args)) == 1

    async def submit(self, consumer: str, claim: Claim, header: Header, payload: bytes, ttl_s: int) -> bool:
        """Write the payload, then commit it with its header. Returns False, with nothing stored, if the ticket was no longer
        held.

        `payload` is an encoded `Payload`; it is sealed and written with an expiry that the commit removes. For a ticket of an
        evaluation round, whose tokens are not kept, it is empty. Groups submitted at the same time share a request. With shards,
        payloads are written there first.
        """
        args = (consumer, claim.entry, claim.fence, claim.ticket_id, codec.encode(header))
        sealed = codec.seal(payload) if payload else b""
        accepted = await self._submissions.ask(_Submission(claim.payload, sealed, ttl_s, args))
        if accepted == -1:
            raise StoreError(
                f"payload of ticket {claim.ticket_id} was gone when its header arrived: it expires after {ttl_s} s; check "
                "whether this machine was suspended, and whether Redis evicts keys (maxmemory-policy must be noeviction)"
            )
        if accepted == -2:
            raise ValueError(
                f"header of ticket {claim.ticket_id} has {len(args[-1])} bytes and is too large for a stream entry: lower "
                "sampling.group_size; in environments, also the segments of a rollout, or the parts of a score"
            )
        return bool(accepted)

    async def _submit(self, groups: Sequence[_Submission]) -> list[int]:
        whole, shards = [group for group in groups if group.sealed], self._payloads.shards
        if shards and whole:
            await self._payloads.lay({group.payload: group.sealed for group in whole})
        writes = [
            ("SET", self._keys.payload(group.payload), group.payload if shards else group.sealed, "EX", group.ttl_s, "NX")
            for group in whole
        ]
        submit = self._redis.function("submit", *chain(*(group.args for group in groups)))
        return (await self._redis.send(*writes, submit))[-1]

    async def save_partial(self, consumer: str, claim: Claim, data: bytes, ttl_s: int) -> bool:
        """Save the tokens so far of a ticket. Returns False if it was no longer held."""
        return bool(await self._redis.call("save_partial", consumer, claim.entry, claim.fence, claim.ticket_id, ttl_s, data))

    async def load_partial(self, ticket: str) -> bytes | None:
        """Return the tokens so far of a ticket that was started before."""
        return await self._redis.ask(self._redis.client.get(self._keys.partial(ticket)))

    async def commit_turn(self, consumer: str, claim: Claim, place: TurnPlace, record: bytes, ttl_s: int) -> bool:
        """Append a record to the history of a rollout. Returns False if the ticket was no longer held or the rollout has started
        again. Records that are appended at the same time share a request. Raises `OutOfOrder` if the record before it is missing.
        """
        args = (consumer, claim.entry, claim.fence, claim.ticket_id, *place, record)
        answer = await self._commits.ask((ttl_s, args))
        if answer < 0:
            raise OutOfOrder(f"record {place.place} of sample {place.sample} of ticket {claim.ticket_id} has none before it")
        return bool(answer)

    async def _commit_turns(self, commits: Sequence[tuple[int, tuple[Any, ...]]]) -> list[int]:
        """Append records, each given by its expiry in seconds and the arguments of the function."""
        return await self._redis.call("commit_turn", max(ttl_s for ttl_s, _ in commits), *chain(*(args for _, args in commits)))

    async def restart_rollout(self, consumer: str, claim: Claim, sample: int, restarts: int, ttl_s: int) -> bool:
        """Delete the history of a rollout, which restarts for the `restarts`-th time. Returns False if the ticket was no longer
        held.
        """
        args = (consumer, claim.entry, claim.fence, claim.ticket_id, sample, restarts, ttl_s)
        return bool(await self._redis.call("restart_rollout", *args))

    async def turns(self, ticket: str) -> dict[int, tuple[int, list[bytes]]]:
        """Return sample -> how often its rollout has started again, and its records since then, for samples that have any."""
        found = await self._redis.ask(self._redis.client.hgetall(self._keys.turns(ticket)))
        restarts: dict[int, int] = {}
        records: dict[int, dict[int, bytes]] = {}
        for field, value in found.items():
            sample, _, place = field.decode().partition(":")
            if place:
                records.setdefault(int(sample), {})[int(place)] = value
            else:
                restarts[int(sample)] = int(value)
        return {
            sample: (restarts.get(sample, 0), [record for _, record in sorted(records.get(sample, {}).items())])
            for sample in {*restarts, *records}
        }


def _encoded(tickets: Sequence[Ticket]) -> Iterator[str | bytes]:
    """Return name and body of each ticket, one after the other."""
    return chain.from_iterable((ticket.id, codec.encode(ticket)) for ticket in tickets)


def _lanes(tickets: Sequence[Ticket], environments: Collection[str]) -> str:
    """Return a text with 1 for each ticket that is for environments, and 0 for the others."""
    return "".join("1" if ticket.source in environments else "0" for ticket in tickets)
