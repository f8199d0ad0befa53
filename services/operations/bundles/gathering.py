"""Reads the steps of a bundle from a run's Redis.

Guarantees: the result is complete: every plan, header and payload of every step; it changes nothing in Redis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from services.operations.bundles.format import RecordedGroup, RecordedStep
from services.protocol import codec
from services.protocol.errors import Damaged, NotFound
from services.protocol.messages import Header
from services.protocol.payloads import Payload
from services.store import Store


class Judged(NamedTuple):
    """What completions of a prompt are judged by; `answer` is None if that is not known."""

    answer: str | None
    row: str


async def gather(
    store: Store, first: int, last: int, judged: Callable[[Header, Payload], Judged]
) -> tuple[list[RecordedStep], dict[str, RecordedGroup]]:
    """Return the steps from `first` to `last`, without their metrics, and their groups.

    Raises `NotFound` if any part of them is gone.
    """
    steps, groups = list[RecordedStep](), dict[str, RecordedGroup]()
    for number in range(first, last + 1):
        kept = await store.inspection.kept_step(number)
        if kept is None:
            raise NotFound(_gone(last, number))
        names = sorted({sample.payload for rank in kept.ranks for row in rank.rows for sample in row} - groups.keys())
        try:
            payloads = await store.steps.payloads(names)
        except Damaged:
            raise NotFound(_gone(last, number)) from None
        records = await store.inspection.group_records(kept.plan.groups)
        headers = {record.payload: record.header for record in records.values() if record.header is not None}
        for name, payload in payloads.items():
            header = headers.get(name)
            if header is None:
                raise NotFound(_gone(last, number))
            answer, row = judged(header, payload)
            groups[name] = RecordedGroup(codec.encode(header), codec.encode(payload), answer, row)
        steps.append(RecordedStep(codec.encode(kept.plan), [codec.encode(rank) for rank in kept.ranks], None))
    return steps, groups


def _gone(step: int, missing: int) -> str:
    return (
        f"step {step} cannot be recorded: the plan of step {missing} or its groups are gone from Redis, because a checkpoint "
        "covers them; record a step that no checkpoint covers yet, or a future step with --wait"
    )
