"""Finds the metrics of a step in the run's stream of records, without reading all of it.

Records come in the order of incarnations, and of steps within each. A trainer that was killed records steps again, and one that
hung while its successor restored the run may record a step of the incarnation before; either is near the place where a record
should be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from services.store.connection import Connection
from services.store.facet import Entry

NEAR = 100  # records searched on either side of the place where a step's should be: more than are ever out of order there
TOGETHER = 4  # records read at a place, more than are ever out of order on their own
INCARNATION = "run/incarnation"


async def begun(redis: Connection) -> dict[int, int]:
    """Return the first step of each incarnation that began with a restore."""
    raw = await redis.ask(redis.client.hgetall(redis.keys.samples_state))
    prefix = b"begun:"
    return {int(name.removeprefix(prefix)): int(step) for name, step in raw.items() if name.startswith(prefix)}


async def find_record(redis: Connection, step: int) -> dict[str, float | None] | None:
    """Return the record of a step, of the last incarnation that trained it, by bisecting the stream by time."""
    stream, ask = redis.keys.metrics, redis.ask
    wanted = _Wanted.of(step, await begun(redis))
    first = await ask(redis.client.xrange(stream, count=1))
    last = await ask(redis.client.xrevrange(stream, count=NEAR))
    if not first:
        return None
    if not wanted.precedes_any(last):
        return wanted.found(last)
    low, high = _ms(first[0]), _ms(last[0])
    while low < high:
        middle = (low + high) // 2
        after = await ask(redis.client.xrange(stream, f"{middle}-0", "+", TOGETHER))
        if not after or wanted.precedes_any(after):
            high = middle
        else:
            low = _ms(after[0]) + 1
    before = await ask(redis.client.xrevrange(stream, f"{high}", "-", NEAR))
    after = await ask(redis.client.xrange(stream, f"{high + 1}-0", "+", NEAR))
    return wanted.found([*reversed(after), *before])


class _Wanted(NamedTuple):
    """A step of an incarnation."""

    step: int
    incarnation: int
    """0: the first."""
    later: float
    """The incarnation that follows it."""

    @classmethod
    def of(cls, step: int, begun: Mapping[int, int]) -> _Wanted:
        incarnation = max((each for each, first in begun.items() if first <= step), default=0)
        return cls(step, incarnation, min((each for each in begun if each > incarnation), default=math.inf))

    def precedes_any(self, entries: Sequence[Entry]) -> bool:
        """Return whether it comes before any of these records."""
        return any(
            incarnation >= self.later or (incarnation >= self.incarnation and step > self.step)
            for incarnation, step in map(_place, map(read_record, entries))
        )

    def found(self, entries: Sequence[Entry]) -> dict[str, float | None] | None:
        """Return its oldest record in entries, newest first; of the last incarnation there, as old servers do not know when they
        began."""
        found = [record for record in map(read_record, reversed(entries)) if self._is_of(record)]
        return max(found, key=lambda record: record.get(INCARNATION) or 0.0, default=None)

    def _is_of(self, record: Mapping[str, float | None]) -> bool:
        incarnation, step = _place(record)
        return step == self.step and self.incarnation <= incarnation < self.later


def _ms(entry: tuple[bytes, Any]) -> int:
    return int(entry[0].partition(b"-")[0])


def read_record(entry: Entry) -> dict[str, float | None]:
    """Return the record of an entry of `metrics` or `evaluations`; empty if it cannot be read."""
    try:
        return msgspec.json.decode(entry[1].get(b"m", b""), type=dict[str, float | None])
    except msgspec.MsgspecError:
        return {}


def _place(record: Mapping[str, float | None]) -> tuple[float, float]:
    """Return incarnation and step of a record; -1 for the step of one without it."""
    step = record.get("step")
    return record.get(INCARNATION) or 0.0, -1.0 if step is None else step
