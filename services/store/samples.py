"""Groups waiting for the sample log, and its acknowledgements (functions/samples.lua)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.protocol import codec
from services.protocol.logprob_gaps import LogprobGaps
from services.protocol.payloads import Payload
from services.store.batching import pieces
from services.store.facet import Facet
from services.store.step_records import begun

WHOLE = 2**32  # hashes of tickets are below this
READ_TOGETHER = 64  # payloads in one request, of some 40 KB, up to ten times that
MISSED = "missed:"
GAPS_S = 300  # logprob gaps are kept for this long


def is_sampled(ticket: str, share: float) -> bool:
    """Return whether a ticket is logged, by the same rule as in functions/prelude.lua."""
    return int(hashlib.sha1(ticket.encode()).hexdigest()[:8], 16) < round(share * WHOLE)


@dataclass(frozen=True)
class DroppedGroup:
    """A group that ended without being trained and waits for the sample log."""

    entry: str
    ticket: str
    outcome: str
    """`stale`, `evicted`, `filtered:<why>` or `failed:<reason>`."""
    payload: str
    """Name of its tokens; empty: it has none."""
    header: bytes
    """Its header, or of a ticket that failed in generation the ticket."""
    step: int
    """The step that was being prepared."""
    incarnation: int
    size: int
    """Bytes of its header and tokens."""


class SampleCalls(Facet):
    """Reads groups that the sample log does not have yet, and records which it has."""

    async def waiting(self, count: int) -> list[DroppedGroup]:
        """Return the oldest waiting groups."""
        entries = await self._redis.ask(self._redis.client.xrange(self._keys.samples, "-", "+", count))
        return [_dropped(entry, fields) for entry, fields in entries]

    async def payloads(self, names: Sequence[str]) -> dict[str, Payload]:
        """Return payloads by name, omitting those that are gone or unreadable."""
        found = [await self._payloads.read(piece) for piece in pieces(names, READ_TOGETHER)]
        return {name: one for part in found for name, one in part.items() if isinstance(one, Payload)}

    async def send_gaps(self, step: int, rank: int, gaps: LogprobGaps) -> None:
        """Keep the logprob gaps of a rank's part of a step for `GAPS_S`."""
        await self._redis.send(("SET", self._keys.logprob_gaps(step, rank), codec.seal(codec.encode(gaps)), "EX", GAPS_S))

    async def gaps(self, step: int, ranks: int) -> list[dict[tuple[str, int], np.ndarray] | None]:
        """Return each rank's logprob gaps of a step, by payload and segment; None: they are not there, or damaged."""
        [found] = await self._redis.send(("MGET", *(self._keys.logprob_gaps(step, rank) for rank in range(ranks))))
        return [_gaps(sealed) for sealed in found]

    async def log(self, incarnation: int, step: int, share: float, lease_s: float, entries: Sequence[str] = ()) -> int:
        """Renew the sample log's lease and record what it has: all groups trained up to `step`, and these entries, which are
        deleted with their tokens. Return how many entries wait.
        """
        given = (incarnation, step, round(share * WHOLE), int(1000 * lease_s))
        return int(await self._redis.call("log_samples", *given, *entries))

    async def missed(self) -> dict[str, int]:
        """Return how many groups the log has missed, by outcome, because it was full or its tracker was gone."""
        raw = await self._redis.ask(self._redis.client.hgetall(self._keys.samples_state))
        counts = sorted((name.decode(), value) for name, value in raw.items())
        return {name.removeprefix(MISSED): int(value) for name, value in counts if name.startswith(MISSED)}

    async def begun(self) -> dict[int, int]:
        """Return the first step of each incarnation that a restore began."""
        return await begun(self._redis)


def _gaps(sealed: bytes | None) -> dict[tuple[str, int], np.ndarray] | None:
    try:
        return None if sealed is None else codec.decode(codec.unseal(sealed), LogprobGaps).by_segment()
    except codec.CorruptMessage:
        return None


def _dropped(entry: bytes, fields: dict[bytes, bytes]) -> DroppedGroup:
    ticket, outcome, payload = (fields[name].decode(errors="replace") for name in (b"ticket", b"outcome", b"payload"))
    step, incarnation, size = (int(fields[name]) for name in (b"step", b"incarnation", b"size"))
    return DroppedGroup(entry.decode(), ticket, outcome, payload, fields[b"header"], step, incarnation, size)
