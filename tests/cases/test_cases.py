"""All cases of the kinds that are cured, on the product."""

from __future__ import annotations

import pytest

from tests.cases.runner import DATA, MORE, outcomes, read, summary

FILES = ("math", "judge", "tool_calls", "rows", "door")
"""Files whose cases are all right."""
KINDS = (
    "clock in a chat template",
    "reasoning that the prompt opens",
    "special tokens in completions",
    "nearly equal rewards",
)
"""Kinds of other files whose cases are all right, without those that take seconds."""


def _wrong(kinds: set[str]) -> list[str]:
    found = [
        outcome
        for folder in (DATA, MORE)
        for kind in sorted(kinds)
        for outcome in outcomes(folder, kind)
        if outcome.case["kind"] == kind
    ]
    assert found
    return [f"{one.case['id']}: wanted {one.case['right']!r}, found {one.found!r}" for one in found if not one.right]


@pytest.mark.parametrize("name", FILES)
def test_every_case_of_a_file_is_right(name: str) -> None:
    assert _wrong({case["kind"] for file, case in read(DATA) if file == name}) == []


def test_every_case_of_these_kinds_is_right() -> None:
    assert _wrong(set(KINDS)) == []


@pytest.mark.slow
def test_one_slow_answer_costs_no_other_its_score() -> None:
    assert _wrong({"one slow answer"}) == []


def test_counts_are_by_kind() -> None:
    counts = summary(list(outcomes(DATA, "which-0")))
    assert counts == {"cases": 7, "right": 7, "by_kind": {"which answer": {"cases": 7, "right": 7}}}
