"""Verdicts come from untrusted code: whatever they hold is either used or a fault."""

from __future__ import annotations

import pytest

from services.verifiers.results import Verdict, fault_of

DEEP = "[" * 5000 + "]" * 5000


@pytest.mark.parametrize("note", [DEEP, "{", "\ud800", '"\ud800"', "null"])
def test_notes_that_are_not_json_are_a_fault(note: str) -> None:
    assert "one that is not JSON" in fault_of(Verdict([1.0], {}, [note]), 1, None)
