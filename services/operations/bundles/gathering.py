"""Reads the steps of a bundle from a run's Redis.

Guarantees: the result is complete: every plan, header and payload of every step; what was read in time is kept, whatever Redis
deletes afterwards; it changes nothing in Redis.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from services.operations.bundles.format import RecordedGroup, RecordedStep
from services.protocol import codec
from services.protocol.errors import Damaged, NotFound
from services.protocol.messages import Header
from services.protocol.payloads import Payload
from services.store import Store


class Judged(NamedTuple):
    """The data by which completions of a prompt are judged; `answer` is None if unknown."""

    answer: str | None
    row: str


class StepReader:
    """Reads steps one by one, so that those of a running run can be read as soon as they are prepared."""

    def __init__(self, store: Store, judged: Callable[[Header, Payload], Judged]) -> None:
        self._store, self._judged = store, judged
        self._read: dict[int, tuple[RecordedStep, dict[str, RecordedGroup]]] = {}
        self._incarnation = 0

    async def read_ahead(self, first: int, last: int, incarnation: int) -> None:
        """Read the steps from `first` to `last` as far as Redis has them, in this incarnation of the run."""
        if incarnation != self._incarnation:  # a restore has abandoned what was read
            self._incarnation, self._read = incarnation, {}
        for number in sorted({*range(first, last + 1)} - self._read.keys()):
            with contextlib.suppress(NotFound):
                await self._step(number, last)

    async def gather(self, first: int, last: int) -> tuple[list[RecordedStep], dict[str, RecordedGroup]]:
        """Return the steps from `first` to `last`, without their metrics, and their groups.

        A plan that was prepared again, since Redis had lost it or a group was damaged, is read again. Raises `NotFound` if any
        part of a step is gone that was not read before.
        """
        read = [await self._step(number, last) for number in range(first, last + 1)]
        return [step for step, _ in read], {name: group for _, groups in read for name, group in groups.items()}

    async def _step(self, number: int, last: int) -> tuple[RecordedStep, dict[str, RecordedGroup]]:
        kept, known = await self._store.inspection.kept_step(number), self._read.get(number)
        if known is not None and (kept is None or codec.encode(kept.plan) == known[0].plan):
            return known
        if kept is None:
            raise NotFound(_gone(last, number))
        earlier = {name: group for _, groups in self._read.values() for name, group in groups.items()}
        names = sorted({sample.payload for rank in kept.ranks for row in rank.rows for sample in row})
        groups = {name: earlier[name] for name in names if name in earlier}
        try:
            payloads = await self._store.steps.payloads([name for name in names if name not in groups])
        except Damaged:
            raise NotFound(_gone(last, number)) from None
        records = await self._store.inspection.group_records(kept.plan.groups)
        headers = {record.payload: record.header for record in records.values() if record.header is not None}
        for name, payload in payloads.items():
            header = headers.get(name)
            if header is None:
                raise NotFound(_gone(last, number))
            answer, row = self._judged(header, payload)
            groups[name] = RecordedGroup(codec.encode(header), codec.encode(payload), answer, row)
        step = RecordedStep(codec.encode(kept.plan), [codec.encode(rank) for rank in kept.ranks], None)
        self._read[number] = step, groups
        return self._read[number]


def _gone(step: int, missing: int) -> str:
    return (
        f"step {step} cannot be recorded: the plan of step {missing} or its groups are gone from Redis, because a checkpoint "
        "covers them; record a step that no checkpoint covers yet, or a future step with --wait"
    )
