"""A small part of `python -m tests.mutants`: some guards, and that the campaign reports a guard that no test notices."""

from __future__ import annotations

import pytest

from services.store.functions import library
from tests.mutants import campaign
from tests.mutants.explained import EXPLAINED
from tests.mutants.guards import Guard, guards

SOME = (
    ("commit", "if false then return 0 end"),
    ("desire", "if false then return refusal end"),
    ("pass_over", "register_unfenced("),
)


def _is(guard: Guard, place: str, without: str) -> bool:
    return guard.place == place and guard.without.strip().startswith(without)


def test_guards_cover_all_functions_and_removals_are_distinct() -> None:
    found = guards()
    assert len({guard.removed()[0] for guard in found}) == len(found)
    name, code = library()
    for guard in found:
        other, without = guard.removed()
        assert other in without
        assert name not in without
        assert without != code
    assert {"commit", "claim", "settle", "restore_begin", "eval_volunteer", "lead", "requeue"} <= {guard.place for guard in found}


def test_explanations_refer_to_existing_guards() -> None:
    assert EXPLAINED.keys() <= {guard.name for guard in guards()}
    assert all(EXPLAINED.values())


@pytest.mark.slow
def test_removing_some_guards_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [guard for guard in guards() if any(_is(guard, *some) for some in SOME)]
    assert len(chosen) == len(SOME)
    found = campaign.campaign(chosen, 2, lambda _: None)
    assert found.survivors == []
    assert set(found.killed) == {guard.name for guard in chosen}


def test_a_guard_that_no_test_notices_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "killers", list)
    (guard,) = [guard for guard in guards() if _is(guard, *SOME[0])]
    found = campaign.campaign([guard], 1, lambda _: None)
    assert (found.survivors, found.unexplained) == ([guard.name], [guard.name])
