"""A model of the replay table in plain Python, with lists and exact fractions, to compare with Redis."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

from services.groups.replay_weights import LIGHTEST
from tests.store.replay.tables import SHIFT, Entry, Table

TIE = Fraction(1, 10**6)
"""Rings closer than this, relative to the variate, may come in any order, because a double rounds the fraction."""


@dataclass
class Group:
    """A group in the table."""

    name: str
    seq: int
    oldest: int
    weight: float
    uses: int = 0
    rings: Fraction = Fraction(0)


@dataclass
class Model:
    """The table, and the outcome of each group that left it."""

    sampler: str
    remover: str
    capacity: int
    max_uses: int
    groups: dict[str, Group] = field(default_factory=dict)
    now: Fraction = Fraction(0)
    idle_now: Fraction = Fraction(0)
    drops: dict[str, str] = field(default_factory=dict)
    departed: list[str] = field(default_factory=list)
    steps: list[tuple[list[str], list[str]]] = field(default_factory=list)  # the fresh and departed groups of each step
    retired: set[str] = field(default_factory=set)
    inserted: int = 0
    drawn: int = 0

    @property
    def clocked(self) -> bool:
        return self.sampler in ("uniform", "prioritized")

    @property
    def weighted(self) -> bool:
        return self.sampler == "prioritized" or self.remover == "lowest_priority"

    def speed(self, group: Group) -> Fraction:
        """Return how fast a group's clock runs: its weight if the sampler reads weights, otherwise 1."""
        return Fraction(group.weight) if self.sampler == "prioritized" else Fraction(1)

    def insert(self, name: str, seq: int, entry: Entry) -> None:
        while len(self.groups) >= self.capacity:
            self.drop(self.victim(), "evicted")
        group = self.groups[name] = Group(name, seq, entry.oldest, entry.weight)
        self.inserted += 1
        self.wind(group, Fraction(entry.variate))

    def victim(self) -> Group:
        """Return the group that the remover evicts from a full table."""
        groups = sorted(self.groups.values(), key=lambda group: group.seq)
        by: dict[str, Callable[[], Group]] = {
            "fifo": lambda: groups[0],
            "lowest_priority": lambda: min(groups, key=lambda group: (group.weight, group.name)),
            "stalest": lambda: min(groups, key=lambda group: (group.oldest, group.seq)),
        }
        return by[self.remover]()

    def drop(self, group: Group, outcome: str) -> None:
        del self.groups[group.name]
        if group.uses:
            self.departed.append(group.name)
        else:
            self.drops[group.name] = outcome

    def sweep(self, oldest_fresh: int) -> int:
        stale = sorted((g for g in self.groups.values() if g.oldest < oldest_fresh), key=lambda g: (g.oldest, g.seq))
        for group in stale:
            self.drop(group, "stale")
        return len(stale)

    def wind(self, group: Group, variate: Fraction) -> None:
        speed = self.speed(group)
        group.rings = self.now + variate / speed if speed else self.idle_now + variate

    def left(self, group: Group) -> Fraction:
        """Return what is left of a group's variate."""
        speed = self.speed(group)
        return (group.rings - self.now) * speed if speed else group.rings - self.idle_now

    def reweigh(self, name: str, weight: float) -> None:
        group = self.groups[name]
        left = self.left(group)
        group.weight = weight
        if self.sampler == "prioritized":
            self.wind(group, left)

    def rescale(self, factor: float) -> None:
        left = {name: self.left(group) for name, group in self.groups.items()}
        for name, group in self.groups.items():
            group.weight *= factor
            if group.weight < LIGHTEST:
                group.weight = 0.0
            if self.sampler == "prioritized":
                self.wind(group, left[name])

    def before(self, one: Group, other: Group) -> bool | None:
        """Return whether one group is drawn before another, or None if either order is possible."""
        if not self.clocked:
            keys: dict[str, Callable[[Group], tuple[int, ...]]] = {
                "fifo": lambda group: (group.seq,),
                "lifo": lambda group: (-group.seq,),
                "freshest": lambda group: (-group.oldest, -group.seq),
            }
            return keys[self.sampler](one) < keys[self.sampler](other)
        speeds = self.speed(one), self.speed(other)
        if bool(speeds[0]) != bool(speeds[1]):
            return bool(speeds[0])
        apart = (other.rings - one.rings) * (max(speeds) or 1)
        return None if abs(apart) < TIE else apart > 0

    def fits(self, drawn: Sequence[str]) -> bool | None:
        """Return whether these groups' clocks ring first, in any order, or None if rounding decides."""
        rest = [group for name, group in self.groups.items() if name not in drawn]
        answers = {self.before(self.groups[name], other) for name in drawn for other in rest}
        return False if False in answers else None if None in answers else True

    def check_first(self, first: Sequence[str], wanted: int) -> None:
        """Check that the sampler draws these groups in this order."""
        assert len(first) == len(set(first)) == min(wanted, len(self.groups))
        for one, other in pairwise(first):
            assert self.before(self.groups[one], self.groups[other]) is not False, (one, other)
        assert self.fits(first) is not False

    def prepare(self, drawn: Sequence[str], variates: Sequence[float]) -> None:
        groups = [self.groups[name] for name in drawn]
        if self.clocked:
            for group in groups:
                if self.speed(group):
                    self.now = max(self.now, group.rings)
                else:
                    self.idle_now = max(self.idle_now, group.rings)
            for group, variate in zip(groups, variates, strict=True):
                self.wind(group, Fraction(variate))
        departed, self.departed = self.departed, []
        self.steps.append(([group.name for group in groups if not group.uses], departed))
        for group in groups:
            group.uses += 1
            if group.uses == self.max_uses:
                del self.groups[group.name]
                departed.append(group.name)
        self.drawn += len(drawn)

    def retire(self, count: int) -> None:
        """Let a checkpoint cover the first `count` steps."""
        self.retired |= {name for _, departed in self.steps[:count] for name in departed}

    def kept(self) -> set[str]:
        """Return the groups whose payloads Redis must still hold."""
        in_steps = {name for _, departed in self.steps for name in departed}
        return set(self.groups) | set(self.departed) | in_steps - self.retired

    def check(self, table: Table) -> None:
        """Check that Redis holds the same table."""
        groups = self.groups
        assert table.order == {name: group.seq for name, group in groups.items()}
        assert table.version == {name: group.oldest * SHIFT + group.seq for name, group in groups.items()}
        if self.weighted:
            assert table.weight == {name: group.weight for name, group in groups.items()}
        assert table.uses == dict(Counter(group.uses for group in groups.values()))
        assert (int(table.state.get("inserted", 0)), int(table.state.get("drawn", 0))) == (self.inserted, self.drawn)
        assert table.drops == self.drops
        assert table.departed == self.departed
        self._check_clocks(table)
        ledger = {name[7:]: n for name, n in table.audit.items() if name.startswith("ledger:")}
        counted = Counter(self.drops.values())
        assert {name: ledger.get(name, 0) for name in (*counted, "stale", "evicted")} == {"stale": 0, "evicted": 0, **counted}

    def _check_clocks(self, table: Table) -> None:
        if not self.clocked:
            return
        idle_now = float(table.state.get("idle_now", 0))
        for name, group in self.groups.items():
            speed, left = self.speed(group), float(self.left(group))
            measured = table.clock[name] * float(speed) if speed else table.idle[name] - idle_now
            assert math.isclose(measured, left, rel_tol=1e-6, abs_tol=1e-6), (name, measured, left)
