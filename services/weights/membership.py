"""Membership of weight-sync rounds: a pure state machine (docs/design.md, section 8).

Guarantees: ranks of a group are disjoint ranges that follow the sender's rank 0; a collective group is used again only
with exactly the members it was made for and only when its last round went well for all of them; everything else is a new
epoch, and an epoch number is never used twice.

A round passes these phases, each acknowledged by every member before the next begins:

    gather ─present─▶ join ─joined─▶ pause ─ready─▶ transfer ─applied─▶ done
      ▲                                ▲
      new epoch                        same members as last time

A member may answer `failed` instead, or `declined` when it stays on its version to evaluate: either is an answer, which ends the
wait for it, and leaves it out until the next round. Who cannot reach the place where the group meets says so in `gather`, before
a group is made with it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

STAGE = {"gather": "present", "join": "joined", "pause": "ready", "transfer": "applied"}
"""What members acknowledge in each phase."""


@dataclass(frozen=True)
class CollectiveGroup:
    """A collective group: the sender is rank 0, each member has `worlds[member]` ranks from `ranks[member]` on."""

    epoch: int
    ranks: Mapping[str, int]
    world_size: int

    def owners(self, ranks: Iterable[int]) -> set[str]:
        """The members that these ranks belong to."""
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
    """Which group stands, and who is to be left out while a round is being retried."""

    epoch: int
    group: CollectiveGroup | None = None
    excluded: set[str] = field(default_factory=set)
    unexplained: int = 0
    """Groups that broke in this round with nobody to blame."""

    def begin(self) -> None:
        """A new round: everybody may take part again."""
        self.excluded.clear()
        self.unexplained = 0

    def choose(self, worlds: Mapping[str, int]) -> dict[str, int]:
        """Of the live members those that this round counts on."""
        return {member: world for member, world in worlds.items() if member not in self.excluded}

    def fits(self, worlds: Mapping[str, int]) -> bool:
        """Whether the standing group is exactly for these members."""
        return self.group is not None and set(self.group.ranks) == set(worlds)

    def remake(self, worlds: Mapping[str, int]) -> CollectiveGroup:
        """A group for these members under a new epoch."""
        self.epoch += 1
        self.group = form(self.epoch, worlds)
        return self.group

    def exclude(self, members: Iterable[str]) -> None:
        """Leave members out until the next round, and with them the group they are part of."""
        self.excluded.update(members)
        self.group = None

    def suspects(self) -> set[str]:
        """Whom to leave out when the collective broke: its end tells every member alike, so what one says of it blames nobody.

        Nobody the first time in a round: who is gone or cut off will miss the next gather. From then on half the group, dealt by
        its epoch, so that a fault which always strikes with the same members leaves the others a group.
        """
        assert self.group is not None
        self.unexplained += 1
        members = sorted(self.group.ranks)
        return set() if self.unexplained == 1 else set(random.Random(self.epoch).sample(members, (len(members) + 1) // 2))

    def breaks(self) -> None:
        """The collective failed: the group must not be used again."""
        self.group = None


@dataclass(frozen=True)
class Answers:
    """What the members of a phase have said."""

    done: frozenset[str]
    """They acknowledged the phase."""
    failed: frozenset[str]
    declined: frozenset[str]

    def awaited(self, members: Iterable[str], live: Iterable[str]) -> set[str]:
        """Members that are there and have not answered."""
        return (set(members) & set(live)) - self.done - self.failed - self.declined


def answered(acks: Mapping[str, tuple[str, str]], members: Iterable[str], phase: str) -> Answers:
    """Answers of `members` to a phase, of all acknowledgements of the round's attempt: member -> (stage, detail)."""
    stages = {member: acks.get(member, ("", ""))[0] for member in members}
    said = (
        frozenset(member for member, stage in stages.items() if stage == what) for what in (STAGE[phase], "failed", "declined")
    )
    return Answers(*said)
