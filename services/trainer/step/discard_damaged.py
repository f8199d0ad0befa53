"""Removes groups that cannot be trained from the coming steps; on rank 0.

Guarantees: a payload that is damaged or missing, or does not fit its plan, costs the run its group and nothing else. The
group becomes a dead letter with the reason, and every step that is not in the trainer's weights is replanned without it,
atomically. The other groups stay on the same ranks and rows, and sums and statistics cover what is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate

import msgspec
import structlog
from msgspec.structs import replace

from services.config import RunConfig
from services.groups import group_statistics
from services.groups.denominators import denominator
from services.groups.group_statistics import DAMAGED
from services.protocol.errors import Damaged, OutOfOrder, StoreError
from services.protocol.messages import RankPlan, StepPlan
from services.store import BufferedGroup, Store
from services.trainer.step.priorities import group_of

log = structlog.get_logger()


async def discard_damaged(store: Store, fence: int, first: int, damaged: Damaged, config: RunConfig) -> int:
    """Make dead letters of the groups of damaged payloads. Returns how many. `first` is the first step not in the trainer's
    weights.

    Returns 0 if a step was prepared meanwhile: training then meets the damage again and calls this again.
    """
    reasons = {group_of(name): f"payload {name}: {why}" for name, why in damaged.reasons.items()}
    state = await store.run.state()
    if state is None:
        raise StoreError("the run is gone from Redis")
    steps: list[tuple[StepPlan, list[RankPlan]]] = []
    later: Counter[str] = Counter()  # in how many steps from here on a group is
    for step in range(state.prepared_step, first - 1, -1):
        if (plan := await store.steps.plan(step)) is None:
            continue
        later.update(plan.groups)
        if not reasons.keys().isdisjoint(plan.groups):
            ranks = [await store.steps.rank_plan(step, rank) for rank in range(plan.ranks)]
            plan, ranks = without(plan, ranks, reasons.keys(), config)
            steps.append((recounted(plan, ranks, await _as_drawn(store, plan, later), config), ranks))
    if not steps:
        raise StoreError(f"groups of step {first} with damaged payloads are in no step: {damaged}")
    try:
        # 0: an earlier copy of this call, whose reply was lost, removed them from the plans that were just read.
        buried = await store.steps.discard_damaged(fence, first, state.prepared_step, reasons, steps) or len(reasons)
    except OutOfOrder:
        return 0
    for group, reason in reasons.items():
        log.error("discarded a group", ticket=group, reason=reason)
    return buried


def without(
    plan: StepPlan, ranks: Sequence[RankPlan], groups: AbstractSet[str], config: RunConfig
) -> tuple[StepPlan, list[RankPlan]]:
    """Return the plan of a step without some groups. Of its statistics, only those that are plain counts are updated."""
    rows = [[[sample for sample in row if group_of(sample.payload) not in groups] for row in rank.rows] for rank in ranks]
    ends = list(accumulate(plan.mini_batch_rows))
    batches = [
        [sample for rank in rows for row in rank[end - size : end] for sample in row]
        for end, size in zip(ends, plan.mini_batch_rows, strict=True)
    ]
    left = [sample for batch in batches for sample in batch]
    group_tokens = config.sampling.group_size * config.sampling.max_tokens
    changed = msgspec.structs.replace(
        plan,
        groups=[group for group in plan.groups if group not in groups],
        fresh_groups=[group for group in plan.fresh_groups if group not in groups],
        denominators=[denominator(batch, config.loss.denominator, group_tokens) for batch in batches],
        response_tokens=sum(sample.trained_tokens for sample in left),
        total_tokens=sum(sample.tokens for sample in left),
        stats=plan.stats | {DAMAGED: plan.stats.get(DAMAGED, 0.0) + sum(group in groups for group in plan.groups)},
    )
    return changed, [RankPlan(of_rank) for of_rank in rows]


def recounted(plan: StepPlan, ranks: Sequence[RankPlan], drawn: Sequence[BufferedGroup], config: RunConfig) -> StepPlan:
    """Return the plan with statistics recomputed from what it trains on; `drawn`: its groups as they were when it was made."""
    weights = {group_of(sample.payload): sample.weight for rank in ranks for row in rank.rows for sample in row}
    headers, uses = [group.header for group in drawn], [group.uses for group in drawn]
    used = [weights[group.group] for group in drawn] if config.replay.importance_beta else None
    of_groups = group_statistics.trained(headers, plan.step, uses, config.source_names, used)
    of_groups |= group_statistics.of_rows(ranks, plan.row_tokens or config.trainer.row_tokens, config.admission.prompts_per_step)
    others = {name: value for name, value in plan.stats.items() if name == DAMAGED or not group_statistics.is_trained(name)}
    return msgspec.structs.replace(plan, stats=others | of_groups)


async def _as_drawn(store: Store, plan: StepPlan, later: Mapping[str, int]) -> list[BufferedGroup]:
    """Return the groups of a step with their use counts before it; `later`: in how many steps from this one on each group is."""
    return [replace(group, uses=group.uses - later[group.group]) for group in await store.replay.groups(plan.groups)]
