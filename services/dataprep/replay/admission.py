"""How much work is under way, and when a step may be made. Values in, values out.

Guarantees, where steps are made oldest ticket first: the groups of a step depend on the order of issue, not on the order of
arrival; and unless a ticket was overtaken, or a rate limiter or `min_size` asks for more groups than steps do, nothing becomes
stale: a group is trained at most `max_staleness` steps after the weights that sampled its oldest token. With any sampler: while
steps are missing groups, tickets for them are outstanding or may be issued, so a run is never stuck; a rate limiter that would
stop it for good yields.

Why: a step has prompts_per_step places. Dealing the places of the steps to come to live tickets, oldest first, tells the
last step that a new ticket would train in; it is issued only if that step is within the bound of the weights that will
sample it. Failures and filters only move a ticket forward. With `max_uses` 1 this is the rule of the slots: a run has
(max_staleness + 1) x prompts_per_step of them, and a ticket holds one from its issue until the weights it trained are
published. With more uses a replayed group fills a place that no new prompt has to.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal

from services.config import RunConfig
from services.dataprep.replay.rate_limiter import RateLimiter, rate_limiter
from services.store.records import RunState, SweptTable

ALL_GAPS = 2**53 - 1
"""No issue sequence is larger."""


@dataclass(frozen=True)
class Rules:
    """The part of the configuration that admission depends on."""

    prompts_per_step: int
    max_staleness: int
    overtake: Literal["wait", "drop"] = "wait"
    overtake_deadline_s: float = 600.0
    sampler: str = "fifo"
    max_uses: int = 1
    """0: as often as it is fresh, which needs a limiter."""
    min_size: int = 1
    replaced: int = 0
    """Filtered groups for which a step gets other prompts. Those beyond take their place in it."""
    limiter: RateLimiter | None = None


@dataclass(frozen=True)
class Progress:
    """Where the run stands."""

    next_step: int
    """The first step not prepared."""
    published: int
    """Policy version of the fleet; what is issued before the first is sampled by version 0."""
    steps: int
    """Length of the run."""
    free_slots: int


@dataclass(frozen=True)
class Wait:
    """No step can be made now."""

    why: Literal["groups", "older_ticket", "min_size", "rate_limiter"]
    """Too few groups are ready; enough are but a ticket older than one of them still generates; the table is too small; or
    replay.samples_per_insert asks for more inserts first."""
    deadline_s: float | None = None
    """`older_ticket`: the wait ends after so many further seconds."""


@dataclass(frozen=True)
class PassOver:
    """A step's worth of places, and every group was filtered: no step is made of nothing."""

    gaps_until: int


@dataclass(frozen=True)
class Prepare:
    """Make the step of these groups, in the sampler's order."""

    groups: tuple[str, ...]
    gaps_until: int
    """Filtered groups up to this issue sequence have had their place."""
    overtook: bool = False
    """Whether an older ticket was left behind."""


def rules_of(config: RunConfig) -> Rules:
    """The rules of a run."""
    admission, replay, filters = config.admission, config.replay, config.filters
    return Rules(
        admission.prompts_per_step, admission.max_staleness, admission.overtake, admission.overtake_deadline_s,
        replay.sampler, replay.max_uses, replay.min_size,
        filters.active_sampling_bound * admission.prompts_per_step if filters.active_sampling else 0, rate_limiter(config),
    )  # fmt: skip


def progress_of(state: RunState) -> Progress:
    """Where a run stands, as its hash says."""
    return Progress(state.prepared_step + 1, state.published_version, state.steps, state.slots - state.slots_used)


def is_stale(step: int, oldest: int, max_staleness: int) -> bool:
    """Lag = step - oldest version; a lag equal to the bound is fresh."""
    return step - oldest > max_staleness


def decide(swept: SweptTable, progress: Progress, rules: Rules, waited_s: float) -> Wait | PassOver | Prepare:
    """What to do about the next step. `sweep_and_peek` asked for `prompts_per_step` groups, and passed over `replaced` gaps.

    `waited_s`: for how long `decide` has answered `older_ticket` for this step.
    """
    step = _in_order(swept, rules) if rules.sampler == "fifo" else _at_random(swept, rules)
    if step is None:
        return Wait("groups")
    if isinstance(step, Prepare) and (why := _held_back(swept, len(step.groups), rules)) and not stuck(swept, progress, rules):
        return Wait(why)
    behind = rules.sampler == "fifo" and 0 <= swept.oldest_outstanding < step.gaps_until
    if not behind:
        return step
    if rules.overtake == "wait" and waited_s < rules.overtake_deadline_s:
        return Wait("older_ticket", rules.overtake_deadline_s - waited_s)
    return step if isinstance(step, PassOver) else Prepare(step.groups, step.gaps_until, overtook=True)


def _in_order(swept: SweptTable, rules: Rules) -> Prepare | PassOver | None:
    """The next places in order of issue, those of filtered groups among them."""
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


def _held_back(swept: SweptTable, draws: int, rules: Rules) -> Literal["min_size", "rate_limiter"] | None:
    if swept.size < rules.min_size:
        return "min_size"
    if rules.limiter and not rules.limiter.draws(swept.inserted, swept.drawn, draws):
        return "rate_limiter"
    return None


def stuck(swept: SweptTable, progress: Progress, rules: Rules) -> bool:
    """Whether waiting would bring nothing: no ticket is out, none may be issued, and no step is to be published."""
    return not (swept.outstanding or progress.published < progress.next_step or tickets_to_issue(swept, progress, rules))


def tickets_to_issue(swept: SweptTable, progress: Progress, rules: Rules) -> int:
    """How many tickets to issue now; the end of the run needs fewer than the bound allows."""
    per_step, out_of_reach = rules.prompts_per_step, min(max(progress.published, 0) + rules.max_staleness + 1, progress.steps)
    if progress.next_step >= out_of_reach:
        return 0
    if rules.limiter:
        wanted = rules.limiter.inserts(swept.inserted + swept.outstanding, swept.drawn)
    elif rules.sampler == "fifo" and rules.max_uses > 1:
        wanted = _dealt(swept, progress, rules, out_of_reach)
    else:
        left = rules.max_uses * swept.outstanding + sum((rules.max_uses - used) * n for used, n in swept.uses.items())
        wanted = ((out_of_reach - progress.next_step) * per_step - len(swept.gaps) - left) // rules.max_uses
    if max(progress.published, 0) == progress.next_step:  # nothing is being trained: what is missing now stays missing
        wanted = max(wanted, max(rules.min_size, per_step - len(swept.gaps)) - swept.size - swept.outstanding)
    return max(0, min(wanted, progress.free_slots))


def _dealt(swept: SweptTable, progress: Progress, rules: Rules, out_of_reach: int) -> int:
    """Deal the places of the steps to come to live tickets in order of issue: one place in each of as many steps as they have
    uses left. A new ticket must find its last use before `out_of_reach`, or end with the run."""
    uses_left = [rules.max_uses - used for used in sorted(swept.uses, reverse=True) for _ in range(swept.uses[used])]
    free_from = [progress.next_step] * rules.prompts_per_step  # heap: the step from which each place is free
    # Where filtered groups stand among the others is not told; dealt last, they make no use seem earlier than it is.
    for uses in uses_left + [rules.max_uses] * swept.outstanding + [1] * len(swept.gaps):
        heapq.heapreplace(free_from, free_from[0] + uses)
    count = 0
    while (first := free_from[0]) < progress.steps and min(first + rules.max_uses, progress.steps) <= out_of_reach:
        heapq.heapreplace(free_from, first + rules.max_uses)
        count += 1
    return count
