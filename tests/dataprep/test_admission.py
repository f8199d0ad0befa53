"""Admission: decisions by hand, then whole runs in a simulated world with delays, failures and filtered groups."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.dataprep.admission import Prepare, Ready, Rules, Wait, decide, is_stale, tickets_to_issue

RULES = Rules(prompts_per_step=2, max_staleness=4)


def _ready(*rows: tuple[int, int]) -> list[Ready]:
    return [Ready(f"0-{seq}", seq, oldest) for seq, oldest in rows]


@pytest.mark.parametrize(
    ("oldest", "step", "bound", "stale"), [(95, 100, 4, True), (96, 100, 4, False), (100, 100, 4, False), (0, 0, 0, False)]
)
def test_a_lag_equal_to_the_bound_is_fresh(oldest: int, step: int, bound: int, stale: bool):
    assert is_stale(step, oldest, bound) is stale


def test_a_step_takes_the_oldest_tickets():
    ready = _ready((7, 9), (3, 9), (5, 9))
    assert decide(ready, None, 9, RULES, 0) == Prepare(("0-3", "0-5"), (), overtook=False)
    assert decide(ready, 6, 9, RULES, 0) == Prepare(("0-3", "0-5"), (), overtook=False)


def test_a_step_waits_for_an_older_ticket_until_the_deadline():
    ready = _ready((3, 9), (5, 9))
    assert decide(ready, 4, 9, RULES, 0) == Wait("older_ticket", (), 600.0)
    assert decide(ready, 4, 9, RULES, 590.0) == Wait("older_ticket", (), 10.0)
    assert decide(ready, 4, 9, RULES, 600.0) == Prepare(("0-3", "0-5"), (), overtook=True)
    assert decide(ready, 4, 9, Rules(2, 4, "drop"), 0) == Prepare(("0-3", "0-5"), (), overtook=True)


def test_stale_groups_are_named_and_not_trained():
    ready = _ready((1, 4), (3, 9), (5, 5))
    assert decide(ready, None, 9, RULES, 0) == Prepare(("0-3", "0-5"), ("0-1",), overtook=False)
    assert decide(ready[:2], None, 9, RULES, 0) == Wait("groups", ("0-1",), None)


def test_tickets_fill_the_slots_but_not_past_the_end_of_the_run():
    # 10 slots. Version 3 is published and step 3 prepared, so 2 slots are held by it and 5 by live tickets.
    assert tickets_to_issue([1] * 5, next_step=4, published=3, steps=100, rules=RULES) == 3
    assert tickets_to_issue([1] * 8, next_step=4, published=3, steps=100, rules=RULES) == 0
    # Steps 4 and 5 are the last: 4 places, of which 3 are taken.
    assert tickets_to_issue([1] * 3, next_step=4, published=3, steps=6, rules=RULES) == 1
    assert tickets_to_issue([], next_step=6, published=3, steps=6, rules=RULES) == 0
    assert tickets_to_issue([], next_step=0, published=-1, steps=100, rules=RULES) == 10


@given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 40), st.integers(0, 30), st.integers(0, 3), st.integers(0, 9))
def test_with_one_use_it_is_the_rule_of_the_slots(k: int, staleness: int, live: int, step: int, behind: int, left: int):
    published, steps = max(0, step - behind), step + left
    slots_used = live + k * (step - published)
    expected = max(0, min((staleness + 1) * k - slots_used, left * k - live))
    assert tickets_to_issue([1] * live, step, published, steps, Rules(k, staleness)) == expected


def test_several_uses_take_one_place_in_each_of_several_steps():
    rules = Rules(prompts_per_step=2, max_staleness=2)
    # Version 4 is published, so a ticket may train in steps up to 6. Two places, three uses: one ticket each, steps 4 to 6.
    assert tickets_to_issue([], 4, 4, 100, rules, max_uses=3) == 2
    # One place is taken until step 4, so a ticket with two uses starts at 5 there; the other place is free now, twice over
    # would end at 7.
    assert tickets_to_issue([1], 4, 4, 100, rules, max_uses=2) == 2
    # The run ends with step 4: the second use does not count.
    assert tickets_to_issue([1], 4, 4, 5, rules, max_uses=2) == 1


@dataclass
class World:
    """A run without processes: time goes in ticks, everything random comes from one generator."""

    rules: Rules
    steps: int
    max_uses: int
    dice: random.Random
    drop_share: float
    max_delay: int
    published: int = 0
    prepared: int = -1
    issued: int = 0
    waited: float = 0.0
    generating: dict[int, tuple[int, int]] = field(default_factory=dict)  # seq -> (tick it ends, version it began with)
    table: dict[int, tuple[int, int]] = field(default_factory=dict)  # seq -> (oldest version, uses left)
    training: list[tuple[int, int]] = field(default_factory=list)  # (tick it is published, version)
    trained: list[tuple[int, int, int]] = field(default_factory=list)  # (step, seq, lag)
    stale: int = 0
    tick: int = 0

    def run(self) -> None:
        limit = 40 * self.steps * (self.max_delay + 5)
        while self.published < self.steps:
            assert self.tick < limit, "the run is stuck"
            self._issue()
            self._settle()
            self._prepare()
            self._publish()
            self.tick += 1

    def _issue(self) -> None:
        live = dict.fromkeys(self.generating, self.max_uses) | {seq: uses for seq, (_, uses) in self.table.items()}
        uses_left = [live[seq] for seq in sorted(live)]
        count = tickets_to_issue(uses_left, self.prepared + 1, self.published, self.steps, self.rules, self.max_uses)
        for _ in range(count):
            self.generating[self.issued] = (self.tick + self.dice.randint(1, self.max_delay), self.published)
            self.issued += 1

    def _settle(self) -> None:
        done = [seq for seq, (end, _) in self.generating.items() if end <= self.tick]
        self.dice.shuffle(done)
        for seq in done:
            _, version = self.generating.pop(seq)
            if self.dice.random() >= self.drop_share:  # else it failed or was filtered
                self.table[seq] = (version, self.max_uses)

    def _prepare(self) -> None:
        step = self.prepared + 1
        if step >= self.steps or step > self.published + 1:
            return
        ready = [Ready(str(seq), seq, oldest) for seq, (oldest, _) in self.table.items()]
        decision = decide(ready, min(self.generating, default=None), step, self.rules, self.waited)
        for group in decision.stale:
            del self.table[int(group)]
            self.stale += 1
        if isinstance(decision, Wait):
            self.waited = self.waited + 1 if decision.why == "older_ticket" else 0.0
            return
        self.waited = 0.0
        assert len(decision.groups) == self.rules.prompts_per_step
        for seq in map(int, decision.groups):
            oldest, uses = self.table.pop(seq)
            self.trained.append((step, seq, step - oldest))
            if uses > 1:
                self.table[seq] = (oldest, uses - 1)
        self.prepared = step
        self.training.append((self.tick + self.dice.randint(1, 5), step + 1))

    def _publish(self) -> None:
        while self.training and self.training[0][0] <= self.tick:
            self.published = self.training.pop(0)[1]


def _world(k: int, staleness: int, seed: int, overtake: str = "wait", uses: int = 1, **more: float) -> World:
    rules = Rules(k, staleness, "drop" if overtake == "drop" else "wait", more.get("deadline", 1e9))
    world = World(rules, 25, uses, random.Random(seed), more.get("drop_share", 0.2), int(more.get("max_delay", 12)))
    world.run()
    return world


seeds = st.integers(0, 2**32)


@given(st.integers(1, 5), st.integers(0, 4), seeds, st.floats(0, 0.6), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_waiting_runs_never_exceed_the_lag_bound_nor_drop_a_group(k: int, staleness: int, seed: int, share: float, delay: int):
    world = _world(k, staleness, seed, drop_share=share, max_delay=delay)
    assert world.stale == 0
    assert max(lag for _, _, lag in world.trained) <= staleness
    assert len(world.trained) == 25 * k
    order = [seq for _, seq, _ in world.trained]
    assert order == sorted(order), "a step trained on a younger ticket before an older one"
    assert not world.table, "groups were made that no step needed"
    assert not world.generating


@given(st.integers(1, 3), st.integers(1, 4), st.integers(2, 3), seeds)
@settings(max_examples=100, deadline=None)
def test_the_bound_holds_with_several_uses(k: int, staleness: int, uses: int, seed: int):
    world = _world(k, staleness, seed, uses=min(uses, staleness + 1))
    assert world.stale == 0
    assert max(lag for _, _, lag in world.trained) <= staleness
    assert len(world.trained) == 25 * k


@given(st.integers(1, 5), st.integers(0, 4), seeds, st.sampled_from(["drop", "deadline"]))
@settings(max_examples=200, deadline=None)
def test_overtaking_runs_keep_the_bound_and_are_never_stuck(k: int, staleness: int, seed: int, how: str):
    world = _world(k, staleness, seed, overtake=how, deadline=3.0, max_delay=30)
    assert max(lag for _, _, lag in world.trained) <= staleness
    assert len(world.trained) == 25 * k
    assert len({seq for _, seq, _ in world.trained}) == 25 * k


def test_the_order_does_not_depend_on_the_order_of_arrival():
    # Without failures the tickets of a step are those of its turn, however long each took.
    orders = {tuple((step, seq) for step, seq, _ in _world(3, 2, seed, drop_share=0.0).trained) for seed in range(10)}
    assert orders == {tuple((i // 3, i) for i in range(75))}


def test_full_staleness_is_reached():
    # The bound is not just an upper limit on paper: a slow trainer uses all of it.
    lags = {lag for seed in range(20) for _, _, lag in _world(2, 3, seed, drop_share=0.0, max_delay=1).trained}
    assert max(lags) == 3
