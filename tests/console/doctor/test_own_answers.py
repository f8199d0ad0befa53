"""Doctor scores rows with their own answers: none of which can be right is a problem, with row and score."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.console.doctor import Finding
from services.console.doctor.functions import group_of, verifiers
from services.console.doctor.work import Work
from tests.support.harness import save_model_folder, small_config


def found(tmp_path: Path, verifier: str, *answers: object) -> list[Finding]:
    """Return what is found about a verifier on rows with these answers."""
    save_model_folder(tmp_path / "model")
    data = tmp_path / "own.jsonl"
    data.write_text("".join(json.dumps({"prompt": "1+1?", "answer": answer}) + "\n" for answer in answers))
    given = (f"model.path={tmp_path / 'model'}", f'data.sources=[{{kind="jsonl", path="{data}"}}]', f"verifiers=[{verifier}]")
    return list(verifiers(small_config(tmp_path, None, *given), Work()))


def states(findings: list[Finding]) -> list[str]:
    return [one.state for one in findings]


MATH, EXACT = '{kind="math"}', '{kind="exact", extract="answer is (\\\\d+)"}'


def test_own_answers_that_are_right_are_counted(tmp_path: Path) -> None:
    (one,) = found(tmp_path, MATH, "2", "(1, 2)", "\\frac{1}{2}")
    assert one.state == "ok"
    assert one.detail.startswith("the own answers of 3 of 3 rows are right (source main), in")


def test_an_answer_that_cannot_be_parsed_is_named_with_its_row(tmp_path: Path) -> None:
    (one,) = found(tmp_path, MATH, "2", "\\boxed{}")
    assert one.state == "fault"
    assert "own.jsonl:2" in one.detail
    assert "own.jsonl:1" not in one.detail


def test_answers_that_no_completion_can_have_are_a_problem(tmp_path: Path) -> None:
    (one,) = found(tmp_path, EXACT, "two", "three")
    assert one.state == "fault"
    assert "2 of 2 rows of source main is not right: " in one.detail
    assert "own.jsonl:1 scores 0 for 'two'; " in one.detail
    assert states(found(tmp_path, EXACT, "two", 2.0)) == ["ok", "note"]
    assert states(found(tmp_path, EXACT, 2.0)) == ["ok"], "a whole number of the data is written without a fraction"


def test_other_verifiers_are_called_on_the_first_row(tmp_path: Path) -> None:
    (one,) = found(tmp_path, '{kind="regex", pattern="^<think>"}', "2", "3")
    assert one.detail.startswith("the first row's own answer scores 0 (source main)")


@pytest.mark.parametrize(
    ("pattern", "group"),
    [
        (r"answer is (\d+)", r"\d+"),
        (r"(?i)score[\s:=*]*(-?\d+(?:\.\d+)?)", r"(?i)-?\d+(?:\.\d+)?"),
        (r"[(](a|b(c))[)]", "a|b(c)"),
        (r"\((?=x)(?P<n>[)y]+)\)", "[)y]+"),
        (r"(a)(b)", "a"),
        (r"((?P<n>a)(?P=n))", "(?P<n>a)(?P=n)"),
        ("", ""),
    ],
)
def test_the_first_group_of_a_pattern_is_cut_out(pattern: str, group: str) -> None:
    assert group_of(pattern) == group
