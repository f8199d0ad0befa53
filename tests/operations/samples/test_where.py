"""Expressions select the same rows as in Python; anything else is rejected with a reason."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.operations.samples.columns import NAMES, ExpressionError
from services.operations.samples.search import Search
from tests.operations.samples.made import made_row, write_log

ROWS = [made_row(i) for i in range(40)] + [made_row(40, sample=None, reward=None, completion=None, outcome="failed", scores=None)]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Search:
    folder = tmp_path_factory.mktemp("log")
    write_log(folder, ROWS)
    return Search.of(folder)


def chosen(log: Search, where: str) -> list[int]:
    found = log.find(where, reverse=True, limit=100)
    assert found.total == len(found.rows)
    return [int(row["logged_s"] - 1e9) for row in found.rows]


@pytest.mark.parametrize("where", ["score.exact in (1, 'a')", "length + 1 in (True, 'a')"])
def test_values_of_several_kinds_are_an_error(log: Search, where: str) -> None:
    with pytest.raises(ExpressionError):
        log.find(where)


@pytest.mark.parametrize(
    ("where", "same"),
    [
        ("reward < 0.3 and step > 2", lambda r: r["reward"] is not None and r["reward"] < 0.3 and r["step"] > 2),
        ("1 <= step < 3", lambda r: 1 <= r["step"] < 3),
        ("not solved", lambda r: not r["solved"]),
        ("solved or length >= 15", lambda r: r["solved"] or r["length"] >= 15),
        ("reward is None", lambda r: r["reward"] is None),
        ("reward is not None", lambda r: r["reward"] is not None),
        ("outcome in ('failed', 'stale')", lambda r: r["outcome"] == "failed"),
        ("sample not in (0, 1, 2)", lambda r: r["sample"] not in (0, 1, 2)),
        ("'is 1' in completion", lambda r: "is 1" in (r["completion"] or "")),
        ("'is 1' not in completion", lambda r: r["completion"] is not None and "is 1" not in r["completion"]),
        ("matches(completion, '7$')", lambda r: (r["completion"] or "").endswith("7")),
        ("score.exact > 0.5", lambda r: r["scores"] is not None and r["scores"][0][1] > 0.5),
        ("score['exact'] == 0.25", lambda r: r["scores"] is not None and r["scores"][0][1] == 0.25),
        ("score.other > 0", lambda r: False),
        ("length - prompt_tokens * 2 > 6", lambda r: r["length"] - 6 > 6),
        ("length / 2 == 6.5", lambda r: r["length"] == 13),
        ("group == '0-3'", lambda r: r["group"] == "0-3"),
        ("advantage > -0.1", lambda r: r["advantage"] > -0.1),
        ("-1 < reward", lambda r: r["reward"] is not None),
        ("True", lambda r: True),
    ],
)
def test_an_expression_selects_the_same_rows_as_in_python(log: Search, where: str, same: Any) -> None:
    expected = [i for i, row in enumerate(ROWS) if same(row)]
    assert chosen(log, where) == expected


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("rewrad < 1", "no column 'rewrad'; the columns are group, sample, step"),
        ("score > 1", "write score.NAME"),
        ("reward <", "is not an expression"),
        (r"'\ud800' in completion", "has half of a surrogate pair"),
        (r"source == '\ud800'", "has half of a surrogate pair"),
        (r"score['\udfff'] > 1", "has half of a surrogate pair"),
        ("reward", "'reward' cannot be used as a condition"),
        ("__import__('os').system('true')", "cannot be used as a condition"),
        ("[x for x in (1,)]", "cannot be used as a condition"),
        ("(lambda: 1)() == 1", "cannot be used as a value"),
        ("prompt.__class__ == 1", "cannot be used as a value"),
        ("reward < 'a'", "reward is a number: it cannot be compared with 'a'"),
        ("source == 3", "source is a text: it cannot be compared with 3"),
        ("solved == 3", "solved is True or False: it cannot be compared with 3"),
        ("step in (1, 'a')", "step is a number: it cannot be compared with 'a'"),
        ("prompt + 1 > 2", "prompt is not a number"),
        ("'a' in reward", "reward is not a text"),
        ("matches(completion, '(')", "is not a regular expression"),
        ("step == 10 ** 9", "cannot be used as a value"),
        (f"step == {10**40}", "too large a number"),
        ("not " * 3000 + "solved", "has 12006 characters"),
        ("1 < " * 150 + "step", "more than 200 parts"),
        ("tokens == 1", "no column 'tokens'"),
    ],
)
def test_anything_else_is_rejected_with_a_reason(log: Search, where: str, why: str) -> None:
    with pytest.raises(ExpressionError) as refused:
        log.find(where)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


@given(
    st.text(max_size=60)
    | st.lists(st.sampled_from([*NAMES, "score.a", "<", "==", "in", "not", "and", "(", ")", "1", "'a'"])).map(" ".join)
)
def test_any_text_is_an_expression_or_is_rejected(log: Search, text: str) -> None:
    with contextlib.suppress(ExpressionError):
        assert log.find(text).of == len(ROWS)
