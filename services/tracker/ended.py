"""Reads from Redis which groups ended, in batches that fit into memory.

Waits for: Redis; logprob gaps of the newest step, which ranks send while it is committed. Unblocked by: `GAPS_S`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from services.store import Store
from services.store.records import RunState
from services.store.samples import DroppedGroup, is_sampled
from services.tracker.rows import EndedGroup, Gaps

BATCH = 1024  # maximum number of groups that are read together
BATCH_BYTES = 32 << 20  # of their tokens in memory
GAPS_S = 2.0  # how long the newest step waits for its logprob gaps
GAPS_POLL_S = 0.1


@dataclass
class EndedBatch:
    """Groups that ended, in order."""

    groups: list[EndedGroup]
    entries: list[str]
    """Entries in Redis of those that were dropped."""
    step: int
    """Last step whose groups are among them."""
    more: bool
    """Whether there was no room for all of them."""
    gaps: dict[int, Gaps] = field(default_factory=dict[int, Gaps])
    """Step -> its logprob gaps."""


def pieces(groups: Sequence[EndedGroup]) -> Iterator[list[EndedGroup]]:
    """Yield groups in pieces whose tokens fit into memory."""
    piece, size = list[EndedGroup](), 0
    for group in groups:
        if piece and size + group.payload_bytes > BATCH_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(group)
        size += group.payload_bytes
    if piece:
        yield piece


class EndedGroups:
    """Reads the groups of a run's tickets that are in the log's `share`."""

    def __init__(self, store: Store, share: float) -> None:
        self._store, self._share = store, share
        self._gaps_come = False  # whether this run's trainer sends logprob gaps

    async def after(self, step: int, state: RunState) -> EndedBatch:
        """Return what was dropped, and what the steps after `step` trained."""
        waiting = await self._store.samples.waiting(BATCH)
        found = EndedBatch([_dropped(one) for one in waiting], [one.entry for one in waiting], step, len(waiting) == BATCH)
        groups, size = len(waiting), sum(one.size for one in waiting)
        while found.step < state.committed_step:
            if found.step > step and (groups >= BATCH or size >= BATCH_BYTES):
                found.more = True
                break
            found.step += 1
            trained = await self._trained(found, state)
            groups, size = groups + len(trained), size + sum(group.payload_bytes for group in trained)
        return found

    async def _trained(self, found: EndedBatch, state: RunState) -> list[EndedGroup]:
        """Add the groups of one step, and return them."""
        step = found.step
        plan = await self._store.steps.plan(step)
        names = [] if plan is None else [name for name in plan.groups if is_sampled(name, self._share)]
        if plan is None or not names:
            return []  # retired meanwhile, and counted as missed, or not to be logged
        records = await self._store.inspection.group_records(names)
        trained = [
            EndedGroup(name, step, "trained", state.incarnation, record.header, record.payload, record.header.payload_bytes)
            for name, record in records.items()
            if record.header is not None
        ]
        found.groups += trained
        found.gaps[step] = await self._gaps(step, plan.ranks, step == state.committed_step)
        return trained

    async def _gaps(self, step: int, ranks: int, newest: bool) -> Gaps:
        """Return the logprob gaps of a step. Those of the newest one may still be on their way."""
        until = time.monotonic() + (GAPS_S if newest and self._gaps_come else 0.0)
        while True:
            found = await self._store.samples.gaps(step, ranks)
            if None not in found or time.monotonic() >= until:
                break
            await asyncio.sleep(GAPS_POLL_S)
        self._gaps_come |= any(part is not None for part in found)
        return {segment: gaps for part in found if part is not None for segment, gaps in part.items()}


def _dropped(one: DroppedGroup) -> EndedGroup:
    return EndedGroup(one.ticket, one.step, one.outcome, one.incarnation, one.header, one.payload, one.size)
