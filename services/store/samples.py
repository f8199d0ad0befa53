"""Groups waiting for the sample log, and its acknowledgements (functions/samples.lua)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.protocol import codec
from services.protocol.logprob_gaps import LogprobGaps
from services.store.facet import Facet
from services.store.step_records import begun

if TYPE_CHECKING:
    import numpy as np

    from services.protocol.payloads import Payload

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
        entries = await self._redis.ask(self._redis.commands.xrange(self._keys.samples, "-", "+", count))
        return [_dropped(entry, fields) for entry, fields in entries]

    async def payloads(self, names: Sequence[str]) -> dict[str, Payload]:
        """Return payloads by name, omitting those that are gone or unreadable."""
        from services.protocol.payloads import Payload  # needs numpy, which takes long to import

        found: dict[str, Payload] = {}
        for first in range(0, len(names), READ_TOGETHER):
            piece = names[first : first + READ_TOGETHER]
            for name, sealed in zip(piece, await self._payloads.sealed(piece), strict=True):
                if sealed is None:
                    continue
                try:
                    found[name] = codec.decode(codec.unseal(sealed), Payload)
                except codec.CorruptMessage:
                    continue
        return found

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
        return await self._counts(MISSED)

    async def begun(self) -> dict[int, int]:
        """Return the first step of each incarnation that a restore began."""
        return await begun(self._redis, self._keys)

    async def _counts(self, kind: str) -> dict[str, int]:
        raw = await self._redis.ask(self._redis.commands.hgetall(self._keys.samples_state))
        counts = {name.decode(): value for name, value in raw.items()}
        return {name.removeprefix(kind): int(counts[name]) for name in sorted(counts) if name.startswith(kind)}


def _gaps(sealed: bytes | None) -> dict[tuple[str, int], np.ndarray] | None:
    try:
        return None if sealed is None else codec.decode(codec.unseal(sealed), LogprobGaps).by_segment()
    except codec.CorruptMessage:
        return None


def _dropped(entry: bytes, fields: dict[bytes, bytes]) -> DroppedGroup:
    return DroppedGroup(
        entry=entry.decode(),
        ticket=fields[b"ticket"].decode(errors="replace"),
        outcome=fields[b"outcome"].decode(errors="replace"),
        payload=fields[b"payload"].decode(errors="replace"),
        header=fields[b"header"],
        step=int(fields[b"step"]),
        incarnation=int(fields[b"incarnation"]),
        size=int(fields[b"size"]),
    )
