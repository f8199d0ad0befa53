"""Plans a step: from its groups to packed rows on every rank. Pure; the same input gives the same plan.

Guarantees: every segment is whole, in exactly one row of one rank, and no row exceeds its token budget; every rank has the
same number of rows, some of which may be empty; the cost of ranks is equal to within a few percent, and a mini-batch holds
whole groups; denominators follow the documented formula for any number of ranks and any packing, and are never 0.

Method: groups are dealt to mini-batches. A mini-batch's segments, in the order of groups and of contexts within them, are cut
into one stretch of equal cost per rank, so that a group's payload is fetched by one rank, rarely two. Swaps even out what the
cut leaves uneven (balance.py). Each rank packs its stretch into rows, keeping segments with one context together where it can
(packing.py), since a row holds a context once. With `same_rows`, rows are packed first and dealt to the ranks. With
`scored_apart`, groups without a gradient get rows of their own, before the others: the trainer runs no backward pass for these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from services.dataprep.planning.balance import deal, spread
from services.dataprep.planning.packing import Response, pack
from services.groups.denominators import denominator
from services.protocol.messages import RankPlan, Sample, StepPlan

CROSSOVER_TOKENS = 24_576
"""Length at which attention costs as much as everything else: 12 x width for a dense transformer (24 d^2 against 2 d L operations
per token and layer), here for a width of 2,048. Only the balance between ranks depends on it."""

WORTH_A_ROW = 0.1
"""Share of a mini-batch's tokens that groups without a gradient must have to get separate rows: a row costs a pass through
the model, however short it is."""

ALONE = 4
"""A segment that, with its context, is at least this many times as long as the context may go to a different rank than its group;
the context then goes there too."""


class PlanningError(ValueError):
    """A step that cannot be packed. The message says why and what to change."""


@dataclass(frozen=True)
class Segments:
    """The s segments of a group."""

    rollout: np.ndarray  # [s] int, the rollout that each belongs to
    context: np.ndarray  # [s] int, number of its context; equal contexts have equal numbers
    context_tokens: np.ndarray  # [s] int


@dataclass(frozen=True)
class PlanGroup:
    """A group as planning sees it: n rollouts of s segments."""

    group: str
    payload: str
    prompt_tokens: int
    lengths: np.ndarray  # [s] int, completion tokens
    advantages: np.ndarray  # [n] float
    trained: np.ndarray  # [n] bool, False: masked
    tool_tokens: np.ndarray  # [s] int, completion tokens that the policy did not sample
    fresh: bool = True
    """Whether the group trains for the first time."""
    weight: float = 1.0
    """Importance weight of the group, a factor of its tokens' loss."""
    trace: str = ""
    """Context of its trace; empty if it has none."""
    segments: Segments | None = None
    """None: each rollout has one segment, after the prompt."""

    def columns(self) -> Segments:
        """Return the columns of its segments."""
        size = len(self.lengths)
        return self.segments or Segments(np.arange(size), np.zeros(size, np.int64), np.full(size, self.prompt_tokens))

    @property
    def tokens(self) -> int:
        """Return its tokens, with every context counted once."""
        columns = self.columns()
        contexts = dict(zip(columns.context.tolist(), columns.context_tokens.tolist(), strict=True))
        return sum(contexts.values()) + int(self.lengths.sum())

    @property
    def teaches(self) -> bool:
        """Return whether a rollout in the loss has an advantage other than 0, and the group a weight."""
        return self.weight != 0 and bool((self.advantages[self.trained.astype(bool)] != 0).any())


@dataclass(frozen=True)
class Layout:
    """The shape of a step: ranks, rows, mini-batches and denominator."""

    ranks: int
    row_tokens: int
    mini_batches: int = 1
    denominator: Literal["token", "constant", "sequence", "group"] = "token"
    """What the denominator counts (services/groups/denominators.py)."""
    group_tokens: int = 0
    same_rows: bool = False
    """Pack rows first and deal whole rows to the ranks, so that rows do not depend on the number of ranks."""
    scored_apart: bool = False
    """Give groups whose advantages are all 0 separate rows."""


@dataclass(frozen=True)
class _Samples:
    """All segments of a mini-batch, in the order of groups and of contexts within them. The columns share one index."""

    group: np.ndarray  # [m] index of the group in the step
    index: np.ndarray  # [m] index of the segment in its group
    rollout: np.ndarray  # [m] index of its rollout in the group
    context: np.ndarray  # [m] number of its context in the group
    shared: np.ndarray  # [m] number of its context in the mini-batch
    context_tokens: np.ndarray  # [m]
    tokens: np.ndarray  # [m] context + completion
    trained_tokens: np.ndarray  # [m] completion tokens in the loss
    advantages: np.ndarray  # [m]


def plan_step(
    step: int, groups: Sequence[PlanGroup], layout: Layout, stats: Mapping[str, float] | None = None
) -> tuple[StepPlan, list[RankPlan]]:
    """Return the plan of a step and one `RankPlan` per rank. Raises `PlanningError` if a segment is longer than a row."""
    if not groups:
        raise PlanningError(f"step {step} has no groups")
    _check_lengths(groups, layout.row_tokens)
    rows: list[list[list[Sample]]] = [[] for _ in range(layout.ranks)]
    mini_batch_rows, denominators = list[int](), list[float]()
    response_tokens = total_tokens = 0
    for mini_batch in _mini_batches(groups, layout):
        before = len(rows[0])
        for members in mini_batch:
            _add_rows(rows, groups, members, layout)
        mini_batch_rows.append(len(rows[0]) - before)
        samples = [sample for of_rank in rows for row in of_rank[before:] for sample in row]
        denominators.append(denominator(samples, layout.denominator, layout.group_tokens))
        response_tokens += sum(sample.trained_tokens for sample in samples)
        total_tokens += sum(sample.tokens for sample in samples)
    plan = StepPlan(
        step=step,
        groups=[group.group for group in groups],
        fresh_groups=[group.group for group in groups if group.fresh],
        ranks=layout.ranks,
        rows_per_rank=sum(mini_batch_rows),
        mini_batch_rows=mini_batch_rows,
        denominators=denominators,
        response_tokens=response_tokens,
        total_tokens=total_tokens,
        stats=dict(stats or {}),
        row_tokens=layout.row_tokens,
        traces=[group.trace for group in groups if group.trace],
    )
    return plan, [RankPlan(rank_rows) for rank_rows in rows]


def cost(tokens: np.ndarray, shared: np.ndarray | int = 0) -> np.ndarray:
    """Return the relative cost [m] int64 of segments of `tokens` tokens with their contexts.

    It covers the linear layers and attention: tokens x (crossover + tokens). `shared` counts the tokens of each that the linear
    layers process as part of another segment.
    """
    tokens = tokens.astype(np.int64)
    return (tokens - shared) * CROSSOVER_TOKENS + tokens * tokens


def _check_lengths(groups: Sequence[PlanGroup], row_tokens: int) -> None:
    for group in groups:
        sizes = group.columns().context_tokens + group.lengths
        longest = int(np.argmax(sizes))
        if sizes[longest] > row_tokens:
            what = "its prompt" if group.columns().context[longest] == 0 else "its context"
            raise PlanningError(
                f"completion {longest} of group {group.group} has {sizes[longest]} tokens with {what}, "
                f"more than trainer.row_tokens = {row_tokens}: raise trainer.row_tokens"
            )


def _mini_batches(groups: Sequence[PlanGroup], layout: Layout) -> list[list[list[int]]]:
    """Return [mini-batch][part] -> groups that are packed together."""
    dealt = deal([group.tokens for group in groups], min(layout.mini_batches, len(groups)))
    return [_parts(groups, members, layout) for members in dealt]


def _parts(groups: Sequence[PlanGroup], members: Sequence[int], layout: Layout) -> list[list[int]]:
    """Return the groups of a mini-batch that are only scored, if they are worth separate rows, and the others."""
    if not layout.scored_apart:
        return [list(members)] if members else []
    parts: dict[bool, list[int]] = {False: [], True: []}
    for member in members:
        parts[groups[member].teaches].append(member)
    scored, every = (sum(groups[member].tokens for member in some) for some in (parts[False], members))
    if scored < WORTH_A_ROW * every:
        return [list(members)] if members else []
    return [part for part in parts.values() if part]


def _add_rows(rows: list[list[list[Sample]]], groups: Sequence[PlanGroup], members: Sequence[int], layout: Layout) -> None:
    """Pack these groups into separate rows, and add those to each rank's."""
    samples = _columns(groups, members)
    for rank, packed in enumerate(_pack_ranks(samples, layout)):
        rows[rank].extend([_sample(groups[int(samples.group[i])], samples, i) for i in sorted(row)] for row in packed)


def _columns(groups: Sequence[PlanGroup], members: Sequence[int]) -> _Samples:
    parts: list[tuple[np.ndarray, ...]] = []
    before = 0  # contexts of earlier groups
    for member in members:
        group, of = groups[member], groups[member].columns()
        sizes = of.context_tokens + group.lengths.astype(np.int64)
        trained = np.where(group.trained[of.rollout].astype(bool), group.lengths - group.tool_tokens, 0)
        own = np.full(len(sizes), member), np.arange(len(sizes)), of.rollout, of.context, of.context + before
        columns = (*own, of.context_tokens, sizes, trained, group.advantages[of.rollout].astype(np.float64))
        order = np.argsort(of.context, kind="stable")
        parts.append(tuple(column[order] for column in columns))
        before += int(of.context.max()) + 1
    return _Samples(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _pack_ranks(samples: _Samples, layout: Layout) -> list[list[list[int]]]:
    """Return [rank][row] -> samples. Every rank has the same number of rows, costliest first, so that rows of one index match."""
    costs, budget = cost(samples.tokens, _shared(samples)), layout.row_tokens
    columns = (samples.shared.tolist(), samples.context_tokens.tolist(), samples.tokens.tolist())
    responses = [Response(*of) for of in zip(*columns, strict=True)]
    if layout.same_rows:
        return _deal_rows(list(filter(None, pack([responses], budget)[0])), costs, layout.ranks)
    shares = spread(costs, layout.ranks, samples.tokens >= ALONE * samples.context_tokens)
    packed: list[list[list[int]]] = []
    for share, share_rows in zip(shares, pack([[responses[i] for i in share] for share in shares], budget), strict=True):
        rank_rows = [[share[i] for i in row] for row in share_rows]
        packed.append(sorted(rank_rows, key=lambda row: -int(costs[row].sum())))
    used = max(sum(map(bool, rank_rows)) for rank_rows in packed)  # packing may leave a row over
    return [rank_rows[:used] for rank_rows in packed]


def _shared(samples: _Samples) -> np.ndarray:
    """Return [m] int64: the context's tokens minus this segment's part of them. Groups only split at row and rank ends."""
    _, places, sizes = np.unique(samples.shared, return_inverse=True, return_counts=True)
    return samples.context_tokens - samples.context_tokens // sizes[places]


def _deal_rows(rows: list[list[int]], costs: np.ndarray, ranks: int) -> list[list[list[int]]]:
    """Return [rank][row] -> samples, with empty rows if the number of rows is not divisible by the ranks."""
    dealt = deal([int(costs[row].sum()) for row in rows], ranks)
    rows_per_rank = max(len(places) for places in dealt)
    return [[rows[place] for place in places] + [[]] * (rows_per_rank - len(places)) for places in dealt]


def _sample(group: PlanGroup, samples: _Samples, i: int) -> Sample:
    columns = (samples.tokens, samples.context_tokens, samples.rollout, samples.context)
    trained, advantage = int(samples.trained_tokens[i]), float(samples.advantages[i])
    whole = (int(column[i]) for column in columns)
    return Sample(group.payload, int(samples.index[i]), advantage, trained, float(group.weight), *whole)
