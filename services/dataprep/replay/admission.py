"""Decides how much work is in progress, and when a step may be made. Pure.

Guarantees: if steps take the oldest ticket first, the groups of a step depend on the order of issue, not on the order of
arrival; and unless a ticket was overtaken, nothing becomes stale: a group is trained on at most `max_staleness` steps after the
weights that sampled its oldest token. With any sampler: while steps lack groups, tickets for them are outstanding or may be
issued, so a run never gets stuck.

Why: a step has prompts_per_step places. Assigning the places of future steps to live tickets, oldest first, gives the last step
that a new ticket would train in. The ticket is issued only if that step is within the staleness bound of the weights that will
sample it. Failures and filters only move a ticket to an earlier step. With `max_uses` 1 this is the rule of the slots: a run has
(max_staleness + 1) x prompts_per_step of them, and a ticket holds one from its issue until the weights that it trained are
published. With more uses, a replayed group takes a place that then needs no new prompt.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal

from services.config import RunConfig
from services.store.records import RunState, SweptTable

ALL_GAPS = 2**53 - 1
"""Larger than or equal to any issue sequence number."""

OVERTAKE_S = 600.0
"""Seconds that a ready step waits for an older ticket that is still being generated. After that the step trains without the
ticket, which may then become stale."""

REPLACED_STEPS = 10
"""Filtered groups that are replaced with other prompts in a step, in steps' worth of groups."""


@dataclass(frozen=True)
class Rules:
    """The part of the configuration that admission depends on."""

    prompts_per_step: int
    max_staleness: int
    overtake_s: float = OVERTAKE_S
    sampler: str = "fifo"
    max_uses: int = 1
    replaced: int = 0
    """Filtered groups that are replaced with other prompts in a step. Any beyond keep their place, which stays empty."""


@dataclass(frozen=True)
class Progress:
    """The progress of the run."""

    next_step: int
    """The first step that is not prepared."""
    published: int
    """Policy version of the fleet. Tickets issued before the first are sampled by version 0."""
    steps: int
    """Length of the run."""
    free_slots: int


@dataclass(frozen=True)
class Wait:
    """No step can be made now."""

    why: Literal["groups", "older_ticket"]
    """`groups`: too few groups are ready; `older_ticket`: enough are ready, but a ticket older than one of them is still
    generating."""


@dataclass(frozen=True)
class PassOver:
    """Skip the places of a whole step, since every group for them was filtered."""

    gaps_until: int


@dataclass(frozen=True)
class Prepare:
    """Make the step from these groups, in the sampler's order."""

    groups: tuple[str, ...]
    gaps_until: int
    """Filtered groups up to this issue sequence number have been given their place."""
    overtook: bool = False
    """Whether the step was made without waiting for an older ticket."""


def rules_of(config: RunConfig) -> Rules:
    """Return the admission rules of a run."""
    per_step, replay = config.admission.prompts_per_step, config.replay
    return Rules(per_step, config.admission.max_staleness, OVERTAKE_S, replay.sampler, replay.max_uses, REPLACED_STEPS * per_step)


def progress_of(state: RunState) -> Progress:
    """Return the progress of a run, from its hash."""
    return Progress(state.prepared_step + 1, state.published_version, state.steps, state.slots - state.slots_used)


def is_stale(step: int, oldest: int, max_staleness: int) -> bool:
    """Return whether the lag, step - oldest version, exceeds the bound. A lag equal to the bound is fresh."""
    return step - oldest > max_staleness


def decide(swept: SweptTable, rules: Rules, waited_s: float) -> Wait | PassOver | Prepare:
    """Decide about the next step. `sweep_and_peek` requested `prompts_per_step` groups and skipped `replaced` gaps.

    `waited_s` is how long `decide` has returned `older_ticket` for this step.
    """
    step = _in_order(swept, rules) if rules.sampler == "fifo" else _at_random(swept, rules)
    if step is None:
        return Wait("groups")
    behind = rules.sampler == "fifo" and 0 <= swept.oldest_outstanding < step.gaps_until
    if not behind:
        return step
    if waited_s < rules.overtake_s:
        return Wait("older_ticket")
    return step if isinstance(step, PassOver) else Prepare(step.groups, step.gaps_until, overtook=True)


def _in_order(swept: SweptTable, rules: Rules) -> Prepare | PassOver | None:
    """Return the next places in the order of issue, including those of filtered groups."""
    places = sorted([(seq, group) for group, seq in swept.first] + [(seq, "") for seq in swept.gaps])[: rules.prompts_per_step]
    if len(places) < rules.prompts_per_step:
        return None
    groups, last = tuple(group for _, group in places if group), places[-1][0]
    return Prepare(groups, last) if groups else PassOver(last)


def _at_random(swept: SweptTable, rules: Rules) -> Prepare | PassOver | None:
    wanted = rules.prompts_per_step - len(swept.gaps)
    if wanted <= 0:
        return PassOver(swept.gaps[rules.prompts_per_step - 1])
    if len(swept.first) < wanted:
        return None
    return Prepare(tuple(group for group, _ in swept.first[:wanted]), ALL_GAPS)


def stuck(swept: SweptTable, progress: Progress, rules: Rules) -> bool:
    """Return whether waiting is useless: no ticket is outstanding, none may be issued, and no step is about to be published."""
    return not (swept.outstanding or progress.published < progress.next_step or tickets_to_issue(swept, progress, rules))


def tickets_to_issue(swept: SweptTable, progress: Progress, rules: Rules) -> int:
    """Return how many tickets to issue now. Near its end, the run needs fewer than the bound allows."""
    per_step, out_of_reach = rules.prompts_per_step, min(max(progress.published, 0) + rules.max_staleness + 1, progress.steps)
    if progress.next_step >= out_of_reach:
        return 0
    if rules.sampler == "fifo" and rules.max_uses > 1:
        wanted = _dealt(swept, progress, rules, out_of_reach)
    else:
        left = rules.max_uses * swept.outstanding + sum((rules.max_uses - used) * n for used, n in swept.uses.items())
        wanted = ((out_of_reach - progress.next_step) * per_step - len(swept.gaps) - left) // rules.max_uses
    if max(progress.published, 0) == progress.next_step:  # no step is in training, so a shortage would persist
        wanted = max(wanted, max(1, per_step - len(swept.gaps)) - swept.size - swept.outstanding)
    return max(0, min(wanted, progress.free_slots))


def _dealt(swept: SweptTable, progress: Progress, rules: Rules, out_of_reach: int) -> int:
    """Return how many new tickets still find their last use before `out_of_reach`, or end with the run.

    Assign the places of future steps to live tickets in the order of issue: each gets one place in as many steps as it has uses
    left.
    """
    uses_left = [rules.max_uses - used for used in sorted(swept.uses, reverse=True) for _ in range(swept.uses[used])]
    free_from = [progress.next_step] * rules.prompts_per_step  # heap: the step from which each place is free
    # The position of filtered groups among the others is unknown; assigning them last never puts a use too early.
    for uses in uses_left + [rules.max_uses] * swept.outstanding + [1] * len(swept.gaps):
        heapq.heapreplace(free_from, free_from[0] + uses)
    count = 0
    while (first := free_from[0]) < progress.steps and min(first + rules.max_uses, progress.steps) <= out_of_reach:
        heapq.heapreplace(free_from, first + rules.max_uses)
        count += 1
    return count
