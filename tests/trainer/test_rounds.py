"""Membership of sync rounds: ranges of ranks, when a group may be used again, epochs that never return."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.trainer.rounds import Membership, answered, form

MEMBERS = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 8), min_size=1)


def test_ranks_follow_the_sender_in_order_of_name() -> None:
    group = form(3, {"b": 2, "a": 1, "c": 4})
    assert (group.epoch, dict(group.ranks), group.world_size) == (3, {"a": 1, "b": 2, "c": 4}, 8)


@given(MEMBERS)
def test_ranges_are_disjoint_and_fill_the_world(worlds: dict[str, int]) -> None:
    group = form(1, worlds)
    taken = [rank for member, first in group.ranks.items() for rank in range(first, first + worlds[member])]
    assert sorted([0, *taken]) == list(range(group.world_size))


def test_a_group_is_used_again_only_with_the_same_members() -> None:
    membership = Membership(epoch=7)
    assert not membership.fits({"a": 1})
    membership.remake({"a": 1, "b": 1})
    assert membership.fits({"b": 1, "a": 1})
    assert not membership.fits({"a": 1})
    assert not membership.fits({"a": 1, "b": 1, "c": 1})


@given(st.lists(st.tuples(MEMBERS, st.sampled_from(["remake", "break", "exclude", "begin"])), max_size=30))
def test_epochs_only_grow_and_excluded_members_stay_out_until_the_next_round(
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


def test_an_answer_counts_for_its_phase_only() -> None:
    acks = {"a": ("ready", ""), "b": ("present", ""), "c": ("failed", "why"), "stranger": ("ready", "")}
    assert answered(acks, ["a", "b", "c", "d"], "pause") == ({"a"}, {"c"})
