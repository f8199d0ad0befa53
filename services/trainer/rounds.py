"""Membership of weight-sync rounds: a pure state machine (docs/design.md, section 8).

Guarantees: ranks of a group are disjoint ranges that follow the sender's rank 0; a collective group is used again only
with exactly the members it was made for and only when its last round went well for all of them; everything else is a new
epoch, and an epoch number is never used twice.

A round passes these phases, each acknowledged by every member before the next begins:

    gather ─present─▶ join ─joined─▶ pause ─ready─▶ transfer ─applied─▶ done
      ▲                                ▲
      new epoch                        same members as last time
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

STAGE = {"gather": "present", "join": "joined", "pause": "ready", "transfer": "applied"}
"""What members acknowledge in each phase."""


@dataclass(frozen=True)
class Group:
    """A collective group: the sender is rank 0, each member has `worlds[member]` ranks from `ranks[member]` on."""

    epoch: int
    ranks: Mapping[str, int]
    world_size: int


def form(epoch: int, worlds: Mapping[str, int]) -> Group:
    """Give each member its range of ranks, in order of name."""
    ranks, next_rank = {}, 1
    for member in sorted(worlds):
        ranks[member] = next_rank
        next_rank += worlds[member]
    return Group(epoch, ranks, next_rank)


@dataclass
class Membership:
    """Which group stands, and who is to be left out while a round is being retried."""

    epoch: int
    group: Group | None = None
    excluded: set[str] = field(default_factory=set)

    def begin(self) -> None:
        """A new round: everybody may take part again."""
        self.excluded.clear()

    def choose(self, worlds: Mapping[str, int]) -> dict[str, int]:
        """Of the live members those that this round counts on."""
        return {member: world for member, world in worlds.items() if member not in self.excluded}

    def fits(self, worlds: Mapping[str, int]) -> bool:
        """Whether the standing group is exactly for these members."""
        return self.group is not None and set(self.group.ranks) == set(worlds)

    def remake(self, worlds: Mapping[str, int]) -> Group:
        """A group for these members under a new epoch."""
        self.epoch += 1
        self.group = form(self.epoch, worlds)
        return self.group

    def exclude(self, members: Iterable[str]) -> None:
        """Leave members out until the next round, and with them the group they are part of."""
        self.excluded.update(members)
        self.group = None

    def breaks(self) -> None:
        """The collective failed: the group must not be used again."""
        self.group = None


def answered(acks: Mapping[str, tuple[str, str]], members: Iterable[str], phase: str) -> tuple[set[str], set[str]]:
    """Members that acknowledged the phase, and those that reported a failure."""
    members = set(members)
    done = {member for member in members if acks.get(member, ("", ""))[0] == STAGE[phase]}
    failed = {member for member in members if acks.get(member, ("", ""))[0] == "failed"}
    return done, failed
