"""Membership of weight-sync rounds: a pure state machine (docs/design.md, section 8).

Guarantees: ranks of a group are disjoint ranges after the sender's rank 0; a collective group is reused only with exactly the
members it was formed for and only if its last round succeeded for all of them; otherwise a new epoch begins, and an epoch number
is never used twice.

A round passes these phases, each acknowledged by every member before the next begins:

  gather ─present─▶ join ─joined─▶ pause ─ready─▶ transfer ─applied─▶ done
  ▲                                ▲
  new epoch                        same members as last time

A member may answer `failed` instead, or `declined` when it keeps its version to evaluate. Either answer ends the wait for it, and
excludes it until the next round. A member that cannot reach the rendezvous of the group reports so in `gather`, before a group is
formed with it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

STAGE = {"gather": "present", "join": "joined", "pause": "ready", "transfer": "applied"}
"""What members acknowledge in each phase."""


@dataclass(frozen=True)
class CollectiveGroup:
    """A collective group: the sender is rank 0, each member has `worlds[member]` ranks starting at `ranks[member]`."""

    epoch: int
    ranks: Mapping[str, int]
    world_size: int

    def owners(self, ranks: Iterable[int]) -> set[str]:
        """Return the members that these ranks belong to."""
        firsts = sorted((first, member) for member, first in self.ranks.items())
        return {next(member for first, member in reversed(firsts) if first <= rank) for rank in ranks}


def form(epoch: int, worlds: Mapping[str, int]) -> CollectiveGroup:
    """Give each member its range of ranks, in order of name."""
    ranks, next_rank = {}, 1
    for member in sorted(worlds):
        ranks[member] = next_rank
        next_rank += worlds[member]
    return CollectiveGroup(epoch, ranks, next_rank)


@dataclass
class Membership:
    """The current group, and the members excluded while a round is being retried."""

    epoch: int
    group: CollectiveGroup | None = None
    excluded: set[str] = field(default_factory=set)
    unexplained: int = 0
    """Number of groups that broke in this round with no member to blame."""

    def begin(self) -> None:
        """Start a new round: every member may take part again."""
        self.excluded.clear()
        self.unexplained = 0

    def choose(self, worlds: Mapping[str, int]) -> dict[str, int]:
        """Return the live members that this round includes."""
        return {member: world for member, world in worlds.items() if member not in self.excluded}

    def fits(self, worlds: Mapping[str, int]) -> bool:
        """Return whether the current group is for exactly these members."""
        return self.group is not None and set(self.group.ranks) == set(worlds)

    def remake(self, worlds: Mapping[str, int]) -> CollectiveGroup:
        """Form a group for these members under a new epoch."""
        self.epoch += 1
        self.group = form(self.epoch, worlds)
        return self.group

    def exclude(self, members: Iterable[str]) -> None:
        """Exclude members until the next round, and drop the group if it contains them."""
        self.excluded.update(members)
        self.group = None

    def suspects(self) -> set[str]:
        """Return the members to exclude when the collective broke. It ends for all members alike, so one member's report blames
        nobody.

        Returns none the first time in a round: a member that is gone or disconnected will miss the next gather. After that,
        returns half the group, chosen by its epoch, so that a fault that always strikes with the same members leaves a group of
        the others.
        """
        assert self.group is not None
        self.unexplained += 1
        members = sorted(self.group.ranks)
        return set() if self.unexplained == 1 else set(random.Random(self.epoch).sample(members, (len(members) + 1) // 2))

    def breaks(self) -> None:
        """Note that the collective failed: the group must not be reused."""
        self.group = None


@dataclass(frozen=True)
class Answers:
    """The members' answers to a phase."""

    done: frozenset[str]
    """Members that acknowledged the phase."""
    failed: frozenset[str]
    declined: frozenset[str]

    def awaited(self, members: Iterable[str], live: Iterable[str]) -> set[str]:
        """Return the live members that have not answered."""
        return (set(members) & set(live)) - self.done - self.failed - self.declined


def answered(acks: Mapping[str, tuple[str, str]], members: Iterable[str], phase: str) -> Answers:
    """Return the answers of `members` to a phase, from all acknowledgements of the round's attempt: member -> (stage, detail)."""
    stages = {member: acks.get(member, ("", ""))[0] for member in members}
    said = (
        frozenset(member for member, stage in stages.items() if stage == what) for what in (STAGE[phase], "failed", "declined")
    )
    return Answers(*said)
