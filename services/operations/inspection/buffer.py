"""The replay table: as a whole, and a page of its groups."""

from __future__ import annotations

import numpy as np

from services.operations.inspection import MAX_PAGE, Answer
from services.protocol.errors import NotFound
from services.store import Store
from services.store.calls.inspection import Sort
from services.store.inspection_records import TableRow, TableState


class BufferGroup(Answer):
    """A group in the table."""

    group: str
    """Its ticket, `<epoch>-<row>`."""
    uses: int
    """Steps that have drawn it."""
    weight: float | None
    """Sampling weight, where the table has weights."""
    probability: float | None
    """Weight over the sum of weights, where the sampler draws by them."""
    readable: bool = True
    """False: its header is no header; the fields below are missing."""
    seq: int | None = None
    """Place in the order of issue, from 0."""
    oldest: int | None = None
    """Oldest policy version of a token."""
    newest: int | None = None
    """Newest policy version of a token."""
    lag: int | None = None
    """Step that is prepared next, minus oldest version."""
    reward_mean: float | None = None
    """Mean reward of its completions."""
    reward_std: float | None = None
    """Population standard deviation of their rewards."""
    length_min: int | None = None
    """Tokens of the shortest completion."""
    length_mean: float | None = None
    """Mean tokens of a completion."""
    length_max: int | None = None
    """Tokens of the longest completion."""
    source: str | None = None
    """Name of the prompt source."""
    generator: str | None = None
    """Pod that made it."""


class Buffer(Answer):
    """The replay table and a page of its groups."""

    size: int
    """Groups in the table."""
    capacity: int
    """Most groups there may be."""
    sampler: str
    """How groups are drawn."""
    remover: str
    """What leaves a full table."""
    max_uses: int
    """Draws after which a group leaves; 0: no bound."""
    weight_sum: float | None
    """Sum of the weights, where there are weights."""
    inserted: int
    """Groups that ever entered."""
    drawn: int
    """Draws ever made."""
    uses: dict[int, int]
    """Times drawn -> groups of the table."""
    next_step: int
    """The step that is prepared next; lags are against it."""
    sort: Sort
    """What the groups are sorted by: `order` of issue, oldest `version`, or sampling `weight`."""
    reverse: bool
    """Whether the highest come first."""
    offset: int
    """Groups before the page."""
    groups: list[BufferGroup]
    """The page."""


async def inspect_buffer(store: Store, sort: Sort = "order", offset: int = 0, limit: int = 20, reverse: bool = False) -> Buffer:
    """The table and its groups `offset` to `offset + limit`. Raises `NotFound` when there are no weights to sort by."""
    state = await store.inspection.table_state()
    if sort == "weight" and state.weight_sum is None:
        raise NotFound(
            f"the table has no weights to sort by: replay.sampler is {state.sampler!r} and replay.remover {state.remover!r}; "
            "sort by order or version"
        )
    rows = await store.inspection.table_page(sort, offset, min(limit, MAX_PAGE), reverse)
    return Buffer(
        size=state.size, capacity=state.capacity, sampler=state.sampler, remover=state.remover, max_uses=state.max_uses,
        weight_sum=state.weight_sum, inserted=state.inserted, drawn=state.drawn, uses=state.uses, next_step=state.next_step,
        sort=sort, reverse=reverse, offset=offset, groups=[_group(row, state) for row in rows],
    )  # fmt: skip


def probability(weight: float | None, state: TableState) -> float | None:
    """Share of the next draw, where the sampler draws by weight. Groups of weight 0 are drawn when no others are left."""
    if weight is None or state.sampler != "prioritized" or not state.weight_sum:
        return None
    return weight / state.weight_sum


def _group(row: TableRow, state: TableState) -> BufferGroup:
    record, chance = row.record, probability(row.weight, state)
    header = record.header
    if header is None or not (header.rewards and header.lengths and header.oldest and header.newest):
        return BufferGroup(group=record.group, uses=record.uses, weight=row.weight, probability=chance, readable=False)
    return BufferGroup(
        group=record.group, uses=record.uses, weight=row.weight, probability=chance,
        seq=header.seq, oldest=min(header.oldest), newest=max(header.newest), lag=state.next_step - min(header.oldest),
        reward_mean=float(np.mean(header.rewards)), reward_std=float(np.std(header.rewards)),
        length_min=min(header.lengths), length_mean=float(np.mean(header.lengths)), length_max=max(header.lengths),
        source=header.source, generator=header.generator,
    )  # fmt: skip
