"""The measures of the structure stay within their bounds (`python -m tests.house` prints them all)."""

from __future__ import annotations

import json

import pytest

from tests import house
from tests.house import Measure


@pytest.mark.parametrize("measure", house.QUICK, ids=lambda measure: measure.__name__)
def test_a_measure_is_within_its_bound(measure) -> None:
    found = measure()
    assert found.bound is not None
    assert found.kept, f"{found.name} = {found.value}, at most {found.bound}: {found.where}"


def test_measures_are_not_vacuous() -> None:
    assert house.services_code().value > house.console_code().value > 0
    tickets = house.ticket_files()
    assert "services/generator/worker.py" in tickets.where
    assert "services/trainer" not in tickets.where


def test_odd_words_are_found_in_names_and_across_lines() -> None:
    text = "start anew\ndef relieve(): ...\nself._heeded = 1\nStopped for\n    want of memory. Amid\n"
    assert house.odd_words_of(text) == [(1, "anew"), (2, "relieve"), (3, "heeded"), (4, "for want of"), (5, "Amid")]
    assert house.odd_words_of("a pyramid, heedless; wanted for one of them; unrelieved, to be handed") == []


def test_the_table_marks_what_exceeds_its_bound() -> None:
    lines = house.as_table([Measure("few", 3, 2, "here"), Measure("many", 3000, None), Measure("unknown", None, 0)]).splitlines()
    assert lines[1].split() == ["few", "3", "2", "!", "here"]
    assert lines[2].split() == ["many", "3,000", "-"]
    assert lines[3].split() == ["unknown", "-", "0"]


def test_json_has_values_bounds_and_locations() -> None:
    reported = json.loads(house.as_json([Measure("few", 3, 2, "here"), Measure("many", 3000, None)]))
    assert reported == {"few": 3, "many": 3000, "bounds": {"few": 2}, "where": {"few": "here"}}
