"""Early parts of a step: groups that are certain to be in it, offered to the trainer before the others have arrived.

Guarantees: the plan of a step begins with the rows of its early parts, so what was trained on early is trained on once. An early
part changes nothing else: its groups stay in the replay table until the step is prepared, and a trainer that ignores it, or dies
with it, trains the same plan.

Why: a step waits for its slowest group. A trainer that trains on the others meanwhile has little left to do when that one ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from services.config import RunConfig
from services.dataprep.planning import step
from services.dataprep.planning.plan import plan_early
from services.dataprep.replay import admission
from services.store import BufferedGroup, RunState, Store
from services.store.records import SweptTable

log = structlog.get_logger()

PARTS = 8
"""A part has at least a PARTS-th of a step's groups: each needs its own rows, and rows that are not full cost time."""


class EarlyParts:
    """Offers early parts to a trainer that has nothing else to train."""

    def __init__(self, store: Store, config: RunConfig, rules: admission.Rules) -> None:
        self.store, self.config, self.rules = store, config, rules

    async def offer(self, fence: int, state: RunState, swept: SweptTable) -> int:
        """Offer the groups that are ready as the next early part, if that is worth it. Returns how many groups were offered."""
        number, least = state.prepared_step + 1, -(-self.rules.prompts_per_step // PARTS)
        idle = state.committed_step == state.prepared_step and "trainer" not in state.pause_modes
        if not self.config.trains_early or not idle or number >= self.config.run.steps or len(swept.first) < least:
            return 0
        before = await self.store.steps.early_parts(number)
        offered = {name for part in before for name in part}
        if len(swept.first) - len(offered) < least:
            return 0
        outstanding = await self.store.replay.outstanding(self.rules.prompts_per_step)
        names = [name for name in admission.certain(swept, outstanding, self.rules) if name not in offered]
        if len(names) < least:
            return 0
        groups = await self.store.replay.groups(names)
        planned = [step.plan_group(group.header, self.config, True, 1.0) for group in groups]
        ranks = plan_early(planned, step.layout_of(self.config))
        named = [group.group for group in groups]
        accepted = await self.store.steps.offer_early(fence, state.trainer_fence, number, len(before), named, ranks)
        return len(named) if accepted else 0

    async def of_step(self, number: int, groups: Sequence[BufferedGroup]) -> list[list[str]]:
        """Return the groups of each early part of a step that is to have `groups`."""
        if not self.config.trains_early:
            return []
        parts, there = await self.store.steps.early_parts(number), {group.group for group in groups}
        if all(name in there for part in parts for name in part):
            return parts
        log.warning("a step lacks groups that were offered early: planning it without early parts", step=number)
        return []
