"""Membership of sync rounds: ranges of ranks, when a group may be reused, and epochs that only grow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.weights.rounds.membership import Membership, answered, form

MEMBERS = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 8), min_size=1)


def test_ranks_follow_the_sender_ordered_by_name() -> None:
    group = form(3, {"b": 2, "a": 1, "c": 4})
    assert (group.epoch, dict(group.ranks), group.world_size) == (3, {"a": 1, "b": 2, "c": 4}, 8)


@given(MEMBERS)
def test_ranges_are_disjoint_and_fill_the_world(worlds: dict[str, int]) -> None:
    group = form(1, worlds)
    taken = [rank for member, first in group.ranks.items() for rank in range(first, first + worlds[member])]
    assert sorted([0, *taken]) == list(range(group.world_size))


def test_a_group_is_reused_only_with_the_same_members() -> None:
    membership = Membership(epoch=7)
    assert not membership.fits({"a": 1})
    membership.remake({"a": 1, "b": 1})
    assert membership.fits({"b": 1, "a": 1})
    assert not membership.fits({"a": 1})
    assert not membership.fits({"a": 1, "b": 1, "c": 1})


@given(st.lists(st.tuples(MEMBERS, st.sampled_from(["remake", "break", "exclude", "begin"])), max_size=30))
def test_epochs_grow_and_members_are_excluded_for_one_round(
    events: list[tuple[dict[str, int], str]],
) -> None:
    membership, epochs = Membership(epoch=0), [0]
    for worlds, event in events:
        match event:
            case "remake" if chosen := membership.choose(worlds):
                group = membership.remake(chosen)
                assert group.epoch > epochs[-1]
                assert not set(group.ranks) & membership.excluded
                epochs.append(group.epoch)
            case "break":
                membership.breaks()
                assert not membership.fits(worlds)
            case "exclude":
                membership.exclude(worlds)
                assert membership.choose(worlds) == {}
                assert membership.group is None
            case "begin":
                membership.begin()
                assert membership.choose(worlds) == worlds


@given(MEMBERS)
def test_every_rank_has_an_owner(worlds: dict[str, int]) -> None:
    group = form(1, worlds)
    for member, first in group.ranks.items():
        assert group.owners(range(first, first + worlds[member])) == {member}
    assert group.owners(range(1, group.world_size)) == set(worlds)


@given(MEMBERS.filter(lambda worlds: len(worlds) > 1), st.integers(0, 100), st.data())
def test_a_fault_of_certain_members_leaves_others_a_group(worlds: dict[str, int], epoch: int, data: st.DataObject) -> None:
    """`together` cannot be in one group: it is one member that breaks every group, or two that cannot reach each other."""
    together = data.draw(st.sets(st.sampled_from(sorted(worlds)), min_size=1, max_size=2))
    membership = Membership(epoch)
    served, rounds = False, 0
    while not served:
        membership.begin()
        rounds += 1
        assert rounds < 40, "a group of other members must be found soon"
        for attempt in range(6):  # each attempt except the first excludes half
            if not (chosen := membership.choose(worlds)):
                break
            group = membership.remake(chosen)
            if not together <= set(group.ranks):
                served = True
                break
            blamed = membership.suspects()
            assert bool(blamed) == (attempt > 0)
            membership.exclude(blamed)


def test_an_answer_counts_only_for_its_phase() -> None:
    acks = {"a": ("ready", ""), "b": ("present", ""), "c": ("failed", "why"), "d": ("declined", "why"), "stranger": ("ready", "")}
    answers = answered(acks, "abcde", "pause")
    assert (answers.done, answers.failed, answers.declined) == ({"a"}, {"c"}, {"d"})


def test_members_that_declined_failed_or_left_are_not_awaited() -> None:
    acks = {"a": ("present", ""), "b": ("declined", "evaluates 3"), "c": ("failed", "why")}
    assert answered(acks, "abcde", "gather").awaited("abcde", live="abcd") == {"d"}
    assert answered(acks | {"d": ("declined", "")}, "abcde", "gather").awaited("abcde", live="abcd") == set()


@given(MEMBERS, st.data())
def test_a_round_continues_with_members_that_did_not_decline(worlds: dict[str, int], data: st.DataObject) -> None:
    membership = Membership(epoch=0)
    membership.begin()
    declined = data.draw(st.sets(st.sampled_from(sorted(worlds))))
    acks = {member: ("declined" if member in declined else "present", "") for member in worlds}
    answers = answered(acks, worlds, "gather")
    membership.exclude(set(worlds) - answers.done)
    assert set(membership.choose(worlds)) == set(worlds) - declined
    membership.begin()
    assert membership.choose(worlds) == worlds, "a member declines one round, not later ones"
