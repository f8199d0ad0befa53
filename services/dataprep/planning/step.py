"""Makes a step from the groups that were drawn: advantages, importance weights, statistics, packed rows. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from services.config import RunConfig
from services.dataprep.planning.plan import Layout, PlanGroup, Segments, plan_step
from services.dataprep.replay import generated_statistics
from services.groups import advantages, group_statistics
from services.groups import replay_weights as replay
from services.protocol.messages import Header, RankPlan, StepPlan
from services.store import BufferedGroup
from services.store.records import SweptTable


def layout_of(config: RunConfig) -> Layout:
    """Return the layout of the steps of a run."""
    trainer, loss, sampling = config.trainer, config.loss, config.sampling
    return Layout(
        ranks=config.data_parallel,
        row_tokens=trainer.row_tokens,
        mini_batches=trainer.mini_batches,
        denominator=loss.denominator,
        group_tokens=sampling.group_size * sampling.max_tokens,
        same_rows=trainer.deterministic,
        scored_apart=loss.learns_from_advantages_alone,
    )


def segments_of(header: Header) -> Segments:
    """Return the segments of a group as planning sees them."""
    return Segments(np.asarray(header.owners), np.asarray(header.context_numbers), np.asarray(header.context_sizes))


def plan_group(header: Header, config: RunConfig, fresh: bool, weight: float) -> PlanGroup:
    """Return a group as planning sees it."""
    return PlanGroup(
        header.ticket,
        header.payload,
        header.prompt_tokens,
        np.asarray(header.lengths),
        advantages.advantages(header.rewards, config.advantage.kind),
        advantages.trained(header.truncated, config.advantage.mask_truncated),
        np.asarray(header.tool_tokens),
        fresh,
        weight,
        header.trace,
        segments_of(header),
    )


def make_step(
    step: int,
    groups: Sequence[BufferedGroup],
    swept: SweptTable,
    made: generated_statistics.GeneratedStats,
    config: RunConfig,
) -> tuple[StepPlan, list[RankPlan]]:
    """Plan the step that trains on these groups, which were drawn from the swept table."""
    headers = [group.header for group in groups]
    drawn = [swept.weights.get(group.group, 1.0) for group in groups]
    weights = replay.importance(drawn, config.replay.importance_beta)
    planned = [
        plan_group(group.header, config, group.uses == 0, float(weight)) for group, weight in zip(groups, weights, strict=True)
    ]
    uses, used = [group.uses for group in groups], weights.tolist() if config.replay.importance_beta else None
    record = group_statistics.trained(headers, step, uses, config.source_names, used)
    record |= made.record(headers) | {"replay/buffer/groups": float(swept.size)}
    plan, ranks = plan_step(step, planned, layout_of(config), record)
    rows = group_statistics.of_rows(ranks, plan.row_tokens, config.admission.prompts_per_step)
    return msgspec.structs.replace(plan, stats=plan.stats | rows), ranks
