"""Simulates a run without processes, for tests of admission. Time passes in ticks; all randomness comes from `dice`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from services.dataprep.replay.admission import PassOver, Prepare, Progress, Rules, Wait, decide, tickets_to_issue
from services.store.records import SweptTable

AHEAD = 1  # number of steps that are prepared beyond the one in training


@dataclass
class Group:
    """A group in the table."""

    seq: int
    oldest: int
    uses: int = 0


@dataclass
class World:
    """Dataprep takes turns like services/dataprep/loop.py; generators and the trainer have random delays.

    `fate` maps a ticket's issue sequence to what becomes of it: `group`, `filtered` or `failed`.
    """

    rules: Rules
    steps: int
    dice: random.Random
    fate: Callable[[int], str]
    max_delay: int = 12
    capacity: int = 100_000
    published: int = -1
    prepared: int = -1
    issued: int = 0
    inserted: int = 0
    drawn: int = 0
    waited: float = 0.0
    tick: int = 0
    generating: dict[int, tuple[int, int]] = field(default_factory=dict)  # seq -> (tick of its end, version at its start)
    table: dict[int, Group] = field(default_factory=dict)
    gaps: list[int] = field(default_factory=list)  # groups filtered since the last step
    training: list[tuple[int, int]] = field(default_factory=list)  # (tick of publication, version)
    fresh: Counter[int] = field(default_factory=Counter)  # step -> groups trained for the first time
    made: list[tuple[int, ...]] = field(default_factory=list)  # the groups of every step
    trained: list[tuple[int, int, int]] = field(default_factory=list)  # (step, seq, lag)
    lost: Counter[str] = field(default_factory=Counter)  # groups that left untrained
    passed_over: int = 0
    overtook: int = 0

    @property
    def slots(self) -> int:
        return (self.rules.max_staleness + 1) * self.rules.prompts_per_step

    @property
    def free_slots(self) -> int:
        unpublished = sum(count for step, count in self.fresh.items() if step >= self.published)
        return self.slots - len(self.generating) - sum(not group.uses for group in self.table.values()) - unpublished

    @property
    def progress(self) -> Progress:
        return Progress(self.prepared + 1, self.published, self.steps, self.free_slots)

    def run(self) -> None:
        """Run until the last step is published."""
        limit = 60 * (self.steps + 2) * (self.max_delay + 7)
        while self.published < self.steps:
            assert self.tick < limit, f"the run is stuck: {self}"
            self.turn()

    def turn(self) -> None:
        """Take the turns of one tick."""
        self.settle()
        swept = self.swept()
        if not self.prepare(swept):
            self.issue(swept)
        if self.published < 0 and self.tick > 2:
            self.published = 0
        while self.training and self.training[0][0] <= self.tick:
            self.published = self.training.pop(0)[1]
        self.tick += 1

    def issue(self, swept: SweptTable) -> None:
        count = tickets_to_issue(swept, self.progress, self.rules)
        assert 0 <= count <= self.free_slots
        for _ in range(count):
            self.generating[self.issued] = (self.tick + self.dice.randint(1, self.max_delay), max(self.published, 0))
            self.issued += 1

    def settle(self) -> None:
        done = [seq for seq, (end, _) in self.generating.items() if end <= self.tick]
        self.dice.shuffle(done)
        for seq in done:
            _, version = self.generating.pop(seq)
            fate = self.fate(seq)
            if fate == "filtered":
                self.gaps.append(seq)
            elif fate == "group":
                while len(self.table) >= self.capacity:
                    self.leave(min(self.table), "evicted")
                self.table[seq] = Group(seq, version)
                self.inserted += 1

    def leave(self, seq: int, why: str) -> None:
        if not self.table.pop(seq).uses:
            self.lost[why] += 1

    def swept(self) -> SweptTable:
        stale = [seq for seq, group in self.table.items() if group.oldest < self.prepared + 1 - self.rules.max_staleness]
        for seq in stale:
            self.leave(seq, "stale")
        gaps = sorted(self.gaps)[self.rules.replaced :][: self.slots]
        return SweptTable(
            stale=len(stale), size=len(self.table), outstanding=len(self.generating),
            oldest_outstanding=min(self.generating, default=-1), inserted=self.inserted, drawn=self.drawn, requeued=0,
            uses=dict(Counter(group.uses for group in self.table.values())), gaps=tuple(gaps),
            first=tuple((str(seq), seq) for seq in self.order()[: self.rules.prompts_per_step]),
        )  # fmt: skip

    def order(self) -> list[int]:
        """Return the groups in the order in which the sampler draws them."""
        groups = sorted(self.table)
        match self.rules.sampler:
            case "fifo":
                return groups
            case "lifo":
                return groups[::-1]
            case "freshest":
                return sorted(groups, key=lambda seq: (-self.table[seq].oldest, -seq))
            case _:
                return self.dice.sample(groups, len(groups))

    def prepare(self, swept: SweptTable) -> bool:
        step = self.prepared + 1
        if step >= self.steps or step > max(self.published, 0) + AHEAD:
            return False
        decision = decide(swept, self.rules, self.waited)
        self.waited = self.waited + 1 if isinstance(decision, Wait) and decision.why == "older_ticket" else 0.0
        match decision:
            case Wait():
                return False
            case PassOver():
                before = len(self.gaps)
                self.forget(decision.gaps_until)
                assert self.rules.prompts_per_step <= before - len(self.gaps) <= self.rules.replaced + self.rules.prompts_per_step
                self.passed_over += 1
            case Prepare():
                self.make(step, swept, decision)
        return True

    def make(self, step: int, swept: SweptTable, decision: Prepare) -> None:
        groups, filtered = [int(group) for group in decision.groups], len(self.gaps)
        assert groups == [seq for _, seq in swept.first[: len(groups)]], "not the first groups that the sampler draws"
        assert len(set(groups)) == len(groups) > 0
        self.forget(decision.gaps_until)
        missing = self.rules.prompts_per_step - len(groups)
        assert 0 <= missing <= max(0, filtered - self.rules.replaced), "only a filtered group leaves a place empty"
        for seq in groups:
            group = self.table[seq]
            self.trained.append((step, seq, step - group.oldest))
            self.fresh[step] += not group.uses
            group.uses += 1
            if group.uses == self.rules.max_uses:
                del self.table[seq]
        self.drawn += len(groups)
        self.overtook += decision.overtook
        self.made.append(tuple(groups))
        self.prepared = step
        last = self.training[-1][0] if self.training else self.tick
        self.training.append((last + self.dice.randint(1, 5), step + 1))

    def forget(self, gaps_until: int) -> None:
        self.gaps = [seq for seq in self.gaps if seq > gaps_until]
