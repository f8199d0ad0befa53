"""How much work is under way, and when a step may be made. Values in, values out.

Guarantees, where steps are made oldest ticket first: a group is trained at most `max_staleness` steps after the weights that
sampled its oldest token, so nothing becomes stale unless a ticket was overtaken; the groups of a step depend on the order of
issue, not on the order of arrival; while steps are missing groups, tickets for them are outstanding or may be issued, so a
run is never stuck.

Why: a step has prompts_per_step places. Dealing the places of the steps to come to live tickets, oldest first, tells the
last step that a new ticket would train in; it is issued only if that step is within the bound of the weights that will
sample it. Failures and filters only move a ticket forward. With `max_uses` 1 this is the rule of the slots: a run has
(max_staleness + 1) x prompts_per_step of them, and a ticket holds one from its issue until the weights it trained are
published.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Ready:
    """A group in the replay table."""

    group: str
    seq: int
    """Position of its ticket in the run's order of issue."""
    oldest: int
    """Oldest policy version that sampled one of its tokens."""


SAMPLERS: dict[str, Callable[[Ready], float]] = {"fifo": lambda group: group.seq}
"""By name of the sampler: the groups with the smallest values are drawn."""


@dataclass(frozen=True)
class Rules:
    """The part of the configuration that admission depends on."""

    prompts_per_step: int
    max_staleness: int
    overtake: Literal["wait", "drop"] = "wait"
    overtake_deadline_s: float = 600.0
    sampler: str = "fifo"


@dataclass(frozen=True)
class Wait:
    """No step can be made now. `stale` groups may be dropped at once."""

    why: Literal["groups", "older_ticket"]
    """Too few groups are ready, or enough are but a ticket older than one of them still generates."""
    stale: tuple[str, ...]
    deadline_s: float | None
    """`older_ticket`: the wait ends after so many further seconds."""


@dataclass(frozen=True)
class Prepare:
    """Make the step of these groups, oldest ticket first."""

    groups: tuple[str, ...]
    stale: tuple[str, ...]
    overtook: bool
    """Whether an older ticket was left behind."""


def is_stale(step: int, oldest: int, max_staleness: int) -> bool:
    """Lag = step - oldest version; a lag equal to the bound is fresh."""
    return step - oldest > max_staleness


def decide(ready: Iterable[Ready], oldest_outstanding: int | None, step: int, rules: Rules, waited_s: float) -> Wait | Prepare:
    """What to do about step `step`.

    `ready`: the replay table, in any order. `oldest_outstanding`: smallest sequence number of the tickets issued and not
    settled, None if there are none. `waited_s`: for how long `decide` has answered `older_ticket` for this step.
    """
    fresh: list[Ready] = []
    stale: list[str] = []
    for group in ready:
        if is_stale(step, group.oldest, rules.max_staleness):
            stale.append(group.group)
        else:
            fresh.append(group)
    chosen = heapq.nsmallest(rules.prompts_per_step, fresh, key=SAMPLERS[rules.sampler])
    if len(chosen) < rules.prompts_per_step:
        return Wait("groups", tuple(stale), None)
    behind = oldest_outstanding is not None and oldest_outstanding < max(group.seq for group in chosen)
    if behind and rules.overtake == "wait" and waited_s < rules.overtake_deadline_s:
        return Wait("older_ticket", tuple(stale), rules.overtake_deadline_s - waited_s)
    return Prepare(tuple(group.group for group in chosen), tuple(stale), behind)


def tickets_to_issue(
    uses_left: Iterable[int], next_step: int, published: int, steps: int, rules: Rules, max_uses: int = 1
) -> int:
    """How many tickets to issue now.

    `uses_left`: of each live ticket, in the order of issue, how many steps may still train on it: `max_uses` for one that is
    outstanding, what is left for a group in the table. `next_step`: the first step not prepared. `published`: policy version
    of the fleet; what is issued before the first is sampled by version 0. `steps`: length of the run, whose end needs fewer
    tickets than the bound allows.
    """
    free_from = [next_step] * rules.prompts_per_step  # heap: the step from which each place is free
    for uses in uses_left:
        heapq.heapreplace(free_from, free_from[0] + uses)
    last_fresh = max(published, 0) + rules.max_staleness
    count = 0
    while (first := free_from[0]) < steps and min(first + max_uses, steps) - 1 <= last_fresh:
        heapq.heapreplace(free_from, first + max_uses)
        count += 1
    return count
