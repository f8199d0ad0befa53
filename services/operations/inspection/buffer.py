"""Reads the state of the replay table and a page of its groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from services.operations.inspection.answer import MAX_PAGE, Answer
from services.protocol.errors import NotFound
from services.store import Store
from services.store.inspection import Sort, TableRow, TableState


class BufferGroup(Answer):
    """A group in the table."""

    group: str
    """Ticket of the group, `<epoch>-<row>`."""
    uses: int
    """Number of steps that have sampled it."""
    weight: float | None
    """Sampling weight, if the table has weights."""
    probability: float | None
    """Weight divided by the sum of weights, if the sampler uses weights."""
    readable: bool = True
    """False: the header is damaged, and the fields below are missing."""
    seq: int | None = None
    """Position in the order of issue, from 0."""
    oldest: int | None = None
    """Oldest policy version among its tokens."""
    newest: int | None = None
    """Newest policy version among its tokens."""
    lag: int | None = None
    """Next step to prepare, minus the oldest version."""
    reward_mean: float | None = None
    """Mean reward of its completions."""
    reward_std: float | None = None
    """Population standard deviation of its rewards."""
    length_min: int | None = None
    """Tokens in the shortest segment. Most completions have a single segment."""
    length_mean: float | None = None
    """Mean tokens per segment."""
    length_max: int | None = None
    """Tokens in the longest segment."""
    source: str | None = None
    """Name of the prompt source."""
    generator: str | None = None
    """Pod that generated it."""


class Buffer(Answer):
    """State of the replay table and a page of its groups."""

    size: int
    """Groups in the table."""
    capacity: int
    """Maximum number of groups."""
    sampler: str
    """How groups are sampled."""
    remover: str
    """How groups are evicted from a full table."""
    max_uses: int
    """Number of uses after which a group is removed; 0: no limit."""
    weight_sum: float | None
    """Sum of the weights, if the table has weights."""
    inserted: int
    """Total number of groups inserted."""
    drawn: int
    """Total number of groups sampled."""
    uses: dict[int, int]
    """Number of uses -> number of groups in the table."""
    next_step: int
    """Next step to prepare; lags are relative to it."""
    sort: Sort
    """Sort key of the groups: `order` of issue, oldest `version`, or sampling `weight`."""
    reverse: bool
    """Whether the highest come first."""
    offset: int
    """Number of groups before the page."""
    groups: list[BufferGroup]
    """Groups of the page."""


async def inspect_buffer(store: Store, sort: Sort = "order", offset: int = 0, limit: int = 20, reverse: bool = False) -> Buffer:
    """Return the table and its groups `offset` to `offset + limit`. Raise `NotFound` when there are no weights to sort by."""
    state = await store.inspection.table_state()
    if sort == "weight" and state.weight_sum is None:
        raise NotFound(f"the table has no weights to sort by: replay.sampler is {state.sampler!r}; sort by order or version")
    rows = await store.inspection.table_page(sort, offset, min(limit, MAX_PAGE), reverse)
    groups = [_group(row, state) for row in rows]
    return Buffer(**msgspec.structs.asdict(state), sort=sort, reverse=reverse, offset=offset, groups=groups)


def probability(weight: float | None, state: TableState) -> float | None:
    """Return a group's share of the next draw if the sampler uses weights. Weight 0 is drawn only when nothing else is left."""
    if weight is None or state.sampler != "prioritized" or not state.weight_sum:
        return None
    return weight / state.weight_sum


def _group(row: TableRow, state: TableState) -> BufferGroup:
    record, header = row.record, row.record.header
    found = BufferGroup(
        group=record.group, uses=record.uses, weight=row.weight, probability=probability(row.weight, state), readable=False
    )
    if header is None or not (header.rewards and header.lengths and header.oldest and header.newest):
        return found
    return replace(
        found,
        readable=True,
        seq=header.seq,
        oldest=min(header.oldest),
        newest=max(header.newest),
        lag=state.next_step - min(header.oldest),
        reward_mean=mean(header.rewards),
        reward_std=deviation(header.rewards),
        length_min=min(header.lengths),
        length_mean=mean(header.lengths),
        length_max=max(header.lengths),
        source=header.source,
        generator=header.generator,
    )


def mean(values: Sequence[float]) -> float:
    """Return the mean of values, of which there is at least one."""
    scale = 2.0 ** -len(values).bit_length()  # the sum could be too large; a power of two changes no digit
    return math.fsum(value * scale for value in values) / len(values) / scale


def deviation(values: Sequence[float]) -> float:
    """Return the population standard deviation of values."""
    middle, root = mean(values), math.sqrt(len(values))
    return math.hypot(*(value / root - middle / root for value in values))  # the squares, or their sum, could be too large
