"""Admission: hand-made decisions, then whole runs in a simulated world with delays, failures, filters and replay."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.dataprep.replay.admission import (
    ALL_GAPS,
    OVERTAKE_S,
    PassOver,
    Prepare,
    Progress,
    Rules,
    Wait,
    decide,
    is_stale,
    progress_of,
    rules_of,
    tickets_to_issue,
)
from services.store.records import RunState, SweptTable
from tests.dataprep.replay.admission_world import World
from tests.support.models.tiny_model import make_config

RULES = Rules(prompts_per_step=2, max_staleness=4)
STEPS = 25


def swept(*first: int, **more: Any) -> SweptTable:
    """Return the result of a sweep that finds groups with these issue sequences, none of which has been drawn."""
    found = {
        "stale": 0, "size": len(first), "outstanding": 0, "oldest_outstanding": -1, "inserted": len(first), "drawn": 0,
        "requeued": 0, "uses": {0: len(first)}, "gaps": (),
    }  # fmt: skip
    return SweptTable(**{**found, **more}, first=tuple((f"0-{seq}", seq) for seq in first))


def looks(**more: Any) -> SweptTable:
    """Return the result of a sweep from counts only."""
    return swept(**more)


def test_rules_and_progress_are_read_from_the_configuration_and_the_runs_hash() -> None:
    config = make_config(Path("model"), admission={"prompts_per_step": 3, "max_staleness": 2}, replay={"max_uses": 2})
    assert rules_of(config) == Rules(3, 2, OVERTAKE_S, "fifo", 2, replaced=30)
    state = RunState(100, 9, 4, 40, 6, 7, 6, -1, "dataprep-0", {}, "", "", "data", "config")
    assert progress_of(state) == Progress(next_step=8, published=6, steps=100, free_slots=5)


@pytest.mark.parametrize(
    ("oldest", "step", "bound", "stale"), [(95, 100, 4, True), (96, 100, 4, False), (100, 100, 4, False), (0, 0, 0, False)]
)
def test_a_lag_equal_to_the_bound_is_fresh(oldest: int, step: int, bound: int, stale: bool) -> None:
    assert is_stale(step, oldest, bound) is stale


def test_a_step_takes_what_the_sampler_draws_first() -> None:
    assert decide(swept(3, 5), RULES, 0) == Prepare(("0-3", "0-5"), 5)
    assert decide(swept(5, 3), Rules(2, 4, sampler="uniform"), 0) == Prepare(("0-5", "0-3"), ALL_GAPS)
    assert decide(swept(3), RULES, 0) == decide(swept(3), Rules(2, 4, sampler="lifo"), 0) == Wait("groups")


def test_a_step_waits_for_an_older_ticket_until_the_deadline() -> None:
    look = swept(3, 5, outstanding=1, oldest_outstanding=4)
    assert decide(look, RULES, 0) == decide(look, RULES, 590.0) == Wait("older_ticket")
    assert decide(look, RULES, 600.0) == Prepare(("0-3", "0-5"), 5, overtook=True)
    assert decide(look, Rules(2, 4, 0.0), 0) == Prepare(("0-3", "0-5"), 5, overtook=True)
    assert decide(swept(3, 5, outstanding=1, oldest_outstanding=6), RULES, 0) == Prepare(("0-3", "0-5"), 5)
    assert decide(look, Rules(2, 4, sampler="freshest"), 0) == Prepare(("0-3", "0-5"), ALL_GAPS), "other samplers never wait"


def test_a_filtered_group_takes_its_place_in_order_of_issue() -> None:
    assert decide(swept(3, 5, gaps=(4,)), RULES, 0) == Prepare(("0-3",), 4)
    assert decide(swept(3, 5, gaps=(6,)), RULES, 0) == Prepare(("0-3", "0-5"), 5)
    assert decide(swept(5, gaps=(1, 2, 3)), RULES, 0) == PassOver(2)
    assert decide(swept(gaps=(1,)), RULES, 0) == Wait("groups")
    late = swept(5, gaps=(1, 2), outstanding=1, oldest_outstanding=0)
    assert decide(late, RULES, 0) == Wait("older_ticket")
    assert decide(late, RULES, 601.0) == PassOver(2)


def test_unordered_samplers_let_a_filtered_group_take_any_place() -> None:
    rules = Rules(2, 4, sampler="uniform")
    assert decide(swept(3, 5, gaps=(9,)), rules, 0) == Prepare(("0-3",), ALL_GAPS)
    assert decide(swept(3, 5, gaps=(7, 8, 9)), rules, 0) == PassOver(8), "the third takes a place in the next step"


def test_tickets_fill_the_slots_up_to_the_end_of_the_run() -> None:
    # 10 slots. Version 3 is published and step 3 prepared, so the step holds 2 slots, and live tickets hold 5.
    assert tickets_to_issue(looks(outstanding=5), Progress(4, 3, 100, 3), RULES) == 3
    assert tickets_to_issue(looks(outstanding=3, uses={0: 5}), Progress(4, 3, 100, 0), RULES) == 0
    # Steps 4 and 5 are the last: 4 places, of which 3 are taken.
    assert tickets_to_issue(looks(outstanding=3), Progress(4, 3, 6, 5), RULES) == 1
    assert tickets_to_issue(looks(), Progress(6, 3, 6, 8), RULES) == 0
    assert tickets_to_issue(looks(), Progress(0, -1, 100, 10), RULES) == 10


@given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 40), st.integers(0, 30), st.integers(0, 3), st.integers(0, 9))
def test_with_one_use_only_slots_limit_tickets(k: int, staleness: int, live: int, step: int, behind: int, left: int) -> None:
    published, steps = max(0, step - behind), step + left
    free = (staleness + 1) * k - live - k * (step - published)
    expected = max(0, min(free, left * k - live))
    progress = Progress(step, published, steps, max(0, free))
    for sampler in ("fifo", "uniform"):
        assert tickets_to_issue(looks(outstanding=live), progress, Rules(k, staleness, sampler=sampler)) == expected


def test_several_uses_take_one_place_in_each_of_several_steps() -> None:
    # Version 4 is published, so a ticket can be trained on up to step 6. Two places and three uses: a ticket each, steps 4 to 6.
    assert tickets_to_issue(looks(), Progress(4, 4, 100, 6), Rules(2, 2, max_uses=3)) == 2
    # With two uses, there are places for three tickets, but the second use of the third would be in step 7.
    assert tickets_to_issue(looks(), Progress(4, 4, 100, 6), Rules(2, 2, max_uses=2)) == 2
    # One place is taken until step 4, so a ticket with two uses starts there in step 5. The other place is free now, but a
    # second ticket in it would end in step 7.
    assert tickets_to_issue(looks(size=1, uses={1: 1}), Progress(4, 4, 100, 6), Rules(2, 2, max_uses=2)) == 2
    # The run ends with step 4: the second use does not count.
    assert tickets_to_issue(looks(size=1, uses={1: 1}), Progress(4, 4, 5, 6), Rules(2, 2, max_uses=2)) == 1
    # A filtered group takes one place in step 4: tickets start at 4 and 5.
    assert tickets_to_issue(looks(gaps=(0,)), Progress(4, 4, 100, 6), Rules(2, 2, max_uses=2)) == 2
    # Two older groups have one use left, in step 4, and the third has two: a ticket starts at 5.
    assert tickets_to_issue(looks(size=3, uses={0: 1, 1: 2}), Progress(4, 4, 100, 6), Rules(2, 2, max_uses=2)) == 1


def test_an_unordered_sampler_may_use_a_group_in_any_step() -> None:
    # The six places in steps 4 to 6 suffice for three tickets. One ticket with two uses and a group with one leave room for one.
    rules = Rules(2, 2, sampler="uniform", max_uses=2)
    assert tickets_to_issue(looks(), Progress(4, 4, 100, 6), rules) == 3
    assert tickets_to_issue(looks(size=1, uses={1: 1}, outstanding=1), Progress(4, 4, 100, 6), rules) == 1


seeds = st.integers(0, 2**32)


def world(rules: Rules, seed: int, failed: float = 0.1, filtered: float = 0.2, **more: Any) -> World:
    """Simulate a whole run, in which the fate of a ticket depends only on its issue sequence, and check its bounds."""

    def fate(seq: int) -> str:
        chance = random.Random(f"{more.get('fates', seed)} {seq}").random()
        return "failed" if chance < failed else "filtered" if chance < failed + filtered else "group"

    made = World(rules, STEPS, random.Random(seed), fate, more.get("max_delay", 12), more.get("capacity", 100_000))
    made.run()
    assert max(lag for _, _, lag in made.trained) <= rules.max_staleness
    assert len(made.made) == STEPS
    if rules.max_uses:
        uses = [seq for _, seq, _ in made.trained]
        assert all(uses.count(seq) <= rules.max_uses for seq in set(uses))
    return made


replaced = st.sampled_from([0, 1, 3, 1000])


@given(
    st.integers(1, 5), st.integers(0, 4), st.integers(1, 3), replaced, seeds, st.floats(0, 0.3), st.floats(0, 0.6),
    st.integers(1, 40),
)  # fmt: skip
@settings(max_examples=120, deadline=None)
def test_waiting_runs_never_exceed_the_lag_bound_nor_drop_a_group(
    k: int, staleness: int, uses: int, replaced: int, seed: int, failed: float, filtered: float, delay: int
) -> None:
    rules = Rules(k, staleness, overtake_s=1e9, max_uses=min(uses, staleness + 1), replaced=replaced)
    made = world(rules, seed, failed, filtered, max_delay=delay)
    assert not made.lost
    assert not made.overtook
    order = [seq for _, seq, _ in made.trained]
    if rules.max_uses == 1:
        assert order == sorted(order), "a step trained on a newer ticket before an older one"
        if not filtered or replaced == 1000:
            assert not made.table, "groups were made that no step needed"
            assert not made.generating
    if replaced == 1000:
        assert {len(groups) for groups in made.made} == {k}
        assert not made.passed_over


@given(st.integers(1, 5), st.integers(0, 4), seeds, st.sampled_from(["drop", "deadline"]), replaced)
@settings(max_examples=80, deadline=None)
def test_overtaking_runs_keep_the_bound_and_never_get_stuck(k: int, staleness: int, seed: int, how: str, replaced: int) -> None:
    rules = Rules(k, staleness, 0.0 if how == "drop" else 3.0, replaced=replaced)
    made = world(rules, seed, max_delay=30)
    assert len({seq for _, seq, _ in made.trained}) == len(made.trained)


samplers = st.sampled_from(["fifo", "lifo", "freshest", "uniform"])


@given(samplers, st.integers(1, 5), st.integers(0, 4), st.integers(1, 3), replaced, seeds, st.data())
@settings(max_examples=120, deadline=None)
def test_no_sampler_exceeds_the_bound_or_gets_stuck(
    sampler: str, k: int, staleness: int, uses: int, replaced: int, seed: int, data: st.DataObject
) -> None:
    capacity = data.draw(st.integers(k, 3 * k), "capacity")
    world(Rules(k, staleness, 20.0, sampler, min(uses, staleness + 1), replaced), seed, capacity=capacity)


@pytest.mark.parametrize("replaced", [0, 2, 1000])
def test_a_steps_groups_depend_only_on_the_order_of_issue(replaced: int) -> None:
    rules = Rules(3, 2, overtake_s=1e9, replaced=replaced)
    runs = {tuple(world(rules, seed, 0.1, 0.4, fates=7, max_delay=1 + 4 * seed).made) for seed in range(10)}
    assert len(runs) == 1
    assert len({len(groups) for groups in runs.pop()}) == (1 if replaced == 1000 else 3)


def test_without_failures_or_filters_steps_take_tickets_in_order() -> None:
    runs = {tuple(world(Rules(3, 2, overtake_s=1e9), seed, 0, 0).made) for seed in range(10)}
    assert runs == {tuple((3 * i, 3 * i + 1, 3 * i + 2) for i in range(STEPS))}


@pytest.mark.parametrize("replaced", [0, 2, 1000])
@pytest.mark.parametrize("sampler", ["fifo", "lifo", "freshest", "uniform"])
def test_filtering_all_groups_neither_blocks_nor_makes_empty_steps(sampler: str, replaced: int) -> None:
    made = World(Rules(2, 1, sampler=sampler, replaced=replaced), STEPS, random.Random(1), lambda seq: "filtered")
    for _ in range(400):
        before = made.issued
        for _ in range(2 * made.max_delay):
            made.turn()
        assert made.issued > before, "prompts must still be issued"
        if made.issued > replaced + 100:
            break
    assert made.prepared == -1
    assert made.passed_over > (10 if replaced < 1000 else 0)
    made.fate = lambda seq: "group"
    made.run()
    assert {len(groups) for groups in made.made[1:]} == {2}


def test_a_slow_trainer_reaches_the_staleness_bound() -> None:
    """The bound is tight: a slow trainer reaches it."""
    lags = {lag for seed in range(20) for _, _, lag in world(Rules(2, 3), seed, 0, 0, max_delay=1).trained}
    assert max(lags) == 3
