"""Reads one step: the groups of its plan and how they are packed or, once the plan is deleted, its metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from services.operations.inspection.answer import MAX_PAGE, Answer
from services.protocol.errors import NotFound
from services.protocol.messages import Sample
from services.store import Store
from services.store.inspection import GroupRecord, KeptStep


class Spread(Answer):
    """Minimum, mean and maximum of some numbers."""

    min: float
    mean: float
    max: float


class StepGroup(Answer):
    """A group that the step trains on."""

    group: str
    """Ticket of the group, `<epoch>-<row>`."""
    fresh: bool
    """True: it is trained on for the first time; False: it is replayed."""
    uses: int | None
    """Number of steps that have sampled it so far, including this one and later ones; null: the group is deleted."""
    oldest: int | None
    """Oldest policy version among its tokens."""
    newest: int | None
    """Newest policy version among its tokens."""
    lag: int | None
    """Step minus the oldest version."""
    weight: float | None
    """Importance weight: factor of its tokens' loss."""
    advantage: Spread | None
    """Advantages of its completions."""
    responses: int
    """Completions in the plan."""
    segments: int
    """Segments of those completions."""
    masked: int
    """Completions without any token in the loss."""
    trained_tokens: int
    """Response tokens in the loss."""


class RankRows(Answer):
    """The rows of one rank; each is a micro-batch."""

    rank: int
    rows: int
    """Number of rows, including empty ones."""
    empty: int
    """Rows without a segment."""
    responses: int
    """Segments in all rows: one for each response whose history was not rewritten."""
    tokens: int
    """Tokens in all rows, of groups that still exist; a context counts once per row."""
    fill: float | None
    """Share of the token budget used by rows with a segment; null without the run's configuration."""


class Plan(Answer):
    """The plan of a step."""

    size: int
    """Number of groups."""
    fresh: int
    """Groups trained on for the first time."""
    mini_batch_rows: list[int]
    """Rows of each mini-batch, on every rank."""
    denominators: list[float]
    """Divisor of the loss of each mini-batch."""
    response_tokens: int
    """Response tokens in the loss."""
    total_tokens: int
    """Tokens of all segments, each counted with its context, although a row holds a context only once."""
    advantage: Spread | None
    """Advantages of all completions."""
    weight: Spread | None
    """Importance weights of all completions."""
    ranks: list[RankRows]
    """Rows of each rank."""
    offset: int
    """Number of groups before the page."""
    groups: list[StepGroup]
    """Groups of the page, in the plan's order."""
    stats: dict[str, float]
    """Metrics of its data (docs/metrics.md)."""


class Step(Answer):
    """A step of the run."""

    step: int
    state: Literal["prepared", "committed", "retired"]
    """`prepared`: planned, not yet trained. `committed`: trained. `retired`: its plan was deleted after a checkpoint."""
    plan: Plan | None
    """Plan of the step; null when it is retired."""
    record: dict[str, float | None] | None
    """Metrics record of the step (docs/metrics.md), once it is trained, if the stream still holds it."""


async def inspect_step(store: Store, step: int, row_tokens: int | None, offset: int = 0, limit: int = 100) -> Step:
    """Return a step with `limit` of its groups. `row_tokens`: token budget of a row. Raise `NotFound` before it is prepared."""
    state = await store.run.state()
    if state is None:
        raise NotFound(f"there is no run {store.keys.name!r} on this Redis")
    if not 0 <= step <= state.prepared_step:
        last = f"the last one is step {state.prepared_step}" if state.prepared_step >= 0 else "no step is"
        raise NotFound(f"step {step} is not prepared yet: {last}")
    kept = await store.inspection.kept_step(step)
    record = await store.inspection.step_record(step) if step <= state.committed_step else None
    if kept is None:
        if step > await store.inspection.retired_step():
            raise NotFound(f"the plan of step {step} cannot be read")
        return Step(step=step, state="retired", plan=None, record=record)
    records = await store.inspection.group_records(kept.plan.groups)
    plan = _plan(kept, records, row_tokens, slice(offset, offset + min(limit, MAX_PAGE)))
    return Step(step=step, state="committed" if step <= state.committed_step else "prepared", plan=plan, record=record)


def _plan(kept: KeptStep, records: Mapping[str, GroupRecord], row_tokens: int | None, shown: slice) -> Plan:
    samples = [sample for rank in kept.ranks for row in rank.rows for sample in row]
    by_group: dict[str, list[Sample]] = {}
    for sample in samples:
        by_group.setdefault(_group_of(sample), []).append(sample)
    plan = kept.plan
    return Plan(
        size=len(plan.groups),
        fresh=len(kept.fresh),
        mini_batch_rows=plan.mini_batch_rows,
        denominators=plan.denominators,
        response_tokens=plan.response_tokens,
        total_tokens=plan.total_tokens,
        advantage=_spread(sample.advantage for sample in _responses(samples)),
        weight=_spread(sample.weight for sample in _responses(samples)),
        ranks=[_rows(rank, given.rows, records, row_tokens) for rank, given in enumerate(kept.ranks)],
        offset=shown.start,
        groups=[
            _group(name, plan.step, name in kept.fresh, records.get(name), by_group.get(name, [])) for name in plan.groups[shown]
        ],
        stats=plan.stats,
    )


def _group_of(sample: Sample) -> str:
    """Return the group of a sample, from its payload's name `<group>.<fence>`."""
    return sample.payload.rpartition(".")[0]


def _responses(samples: list[Sample]) -> list[Sample]:
    """Return one sample of each response."""
    return list({sample.response: sample for sample in samples}.values())


def _group(name: str, step: int, fresh: bool, record: GroupRecord | None, samples: list[Sample]) -> StepGroup:
    header = record.header if record else None
    oldest = min(header.oldest) if header and header.oldest else None
    responses = _responses(samples)
    return StepGroup(
        group=name,
        fresh=fresh,
        uses=record.uses if record else None,
        oldest=oldest,
        newest=max(header.newest) if header and header.newest else None,
        lag=None if oldest is None else step - oldest,
        weight=samples[0].weight if samples else None,
        advantage=_spread(sample.advantage for sample in responses),
        responses=len(responses),
        segments=len(samples),
        masked=len(responses) - len({sample.response for sample in samples if sample.trained_tokens}),
        trained_tokens=sum(sample.trained_tokens for sample in samples),
    )


def _rows(rank: int, rows: list[list[Sample]], records: Mapping[str, GroupRecord], row_tokens: int | None) -> RankRows:
    empty = sum(not row for row in rows)
    tokens = sum(_tokens(row, records) for row in rows)
    full = (len(rows) - empty) * row_tokens if row_tokens else 0
    return RankRows(
        rank=rank, rows=len(rows), empty=empty, responses=sum(map(len, rows)), tokens=tokens, fill=tokens / full if full else None
    )


def _tokens(row: list[Sample], records: Mapping[str, GroupRecord]) -> int:
    """Count the tokens of a row, which holds a context once for all segments that share it."""
    contexts: dict[tuple[str, int], int] = {}
    completions = 0
    for sample in row:
        record = records.get(_group_of(sample))
        header = record.header if record else None
        if header is not None and 0 <= sample.index < min(len(header.lengths), len(header.context_sizes)):
            contexts[sample.payload, sample.context] = header.context_sizes[sample.index]
            completions += header.lengths[sample.index]
    return sum(contexts.values()) + completions


def _spread(numbers: Iterable[float]) -> Spread | None:
    values = list(numbers)
    return Spread(min=min(values), mean=sum(values) / len(values), max=max(values)) if values else None
