"""Conditions select the rows that they describe; what could reach beyond the log is rejected with a reason."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.operations.samples.columns import NAMES
from services.operations.samples.search import FUNCTIONS, ExpressionError, Search
from tests.operations.samples.made import made_row, write_log

ROWS = [made_row(i) for i in range(40)] + [made_row(40, sample=None, reward=None, completion=None, outcome="failed", scores=None)]

SELECTED: dict[str, Callable[[dict[str, Any]], bool]] = {
    "reward < 0.3 and step > 2": lambda r: r["reward"] is not None and r["reward"] < 0.3 and r["step"] > 2,
    "step BETWEEN 1 AND 2": lambda r: 1 <= r["step"] < 3,
    "not solved": lambda r: not r["solved"],
    "solved or length >= 15": lambda r: r["solved"] or r["length"] >= 15,
    "reward is null": lambda r: r["reward"] is None,
    "reward IS NOT NULL": lambda r: r["reward"] is not None,
    "outcome in ('failed', 'stale')": lambda r: r["outcome"] == "failed",
    "sample not in (0, 1, 2)": lambda r: r["sample"] == 3,
    "'is 1' in completion": lambda r: "is 1" in (r["completion"] or ""),
    "'is 1' not in completion": lambda r: r["completion"] is not None and "is 1" not in r["completion"],
    "completion like '%7'": lambda r: (r["completion"] or "").endswith("7"),
    "regexp_matches(completion, '7$')": lambda r: (r["completion"] or "").endswith("7"),
    "score.exact > 0.5": lambda r: r["scores"] is not None and r["scores"][0][1] > 0.5,
    "score['exact'] == 0.25": lambda r: r["scores"] is not None and r["scores"][0][1] == 0.25,
    "score.other > 0": lambda r: False,
    "length - prompt_tokens * 2 > 6": lambda r: r["length"] - 6 > 6,
    "length / 2 == 6.5": lambda r: r["length"] == 13,
    "'é' not in prompt and group == '0-3' -- one of them": lambda r: r["group"] == "0-3",
    "\"group\" = '0-3'": lambda r: r["group"] == "0-3",
    "advantage > -0.1": lambda r: r["advantage"] > -0.1,
    "tokens[1] = 1 and len(tokens) = 2": lambda r: True,
    "True": lambda r: True,
    "undone": lambda r: False,
}
REJECTED = {
    "rewrad < 1": "no column 'rewrad'; the columns are group, sample, step",
    "file like '/%'": "no column 'file'",
    "current_user = 'a'": "no column 'current_user'",
    "reward <": "is not a condition",
    "reward is None": "is not a condition",
    "1 <= step < 3": "use AND to combine comparisons",
    "reward < 1; drop table rows": "is not a condition",
    "1 = 1) or (1 = 1": "is not a condition",
    "1 = 1) union select 1 --": "is not a condition",
    "reward < 1, step < 1": "is not a condition",
    "step = (select count(*) from read_csv('/etc/passwd'))": "has a subquery",
    "exists (from read_text('/etc/passwd'))": "has a subquery",
    "step in (select 1)": "has a subquery",
    "sum(step) over () > 1": "has a window",
    "columns('r.*') > 1": "has a star",
    "$1 = 1": "has a parameter",
    "current_setting('temp_directory') = ''": "current_setting cannot be used",
    "getvariable('a') = 1": "getvariable cannot be used",
    "sum(step) > 1": "sum cannot be used",
    "repeat('a', 1000000000) = ''": "repeat cannot be used",
    "reward < 'a'": "cannot be evaluated",
    "source == 3": "cannot be evaluated",
    "regexp_matches(completion, '(')": "cannot be evaluated",
    "reward < 0.5 and source = '\ud800'": "has half of a surrogate pair",
    "not " * 3000 + "solved": "has 12006 characters",
}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Search:
    folder = tmp_path_factory.mktemp("log")
    write_log(folder, ROWS)
    return Search.of(folder)


def test_a_condition_selects_the_rows_that_it_describes(log: Search) -> None:
    wrong = dict[str, object]()
    for where, same in SELECTED.items():
        found = log.find(where, reverse=True, limit=100)
        chosen = [int(row["logged_s"] - 1e9) for row in found.rows]
        if chosen != [i for i, row in enumerate(ROWS) if same(row)] or found.total != len(chosen):
            wrong[where] = chosen
    assert wrong == {}


def test_what_is_no_condition_or_reaches_beyond_the_log_is_rejected_with_a_reason(log: Search) -> None:
    wrong = dict[str, str]()
    for where, why in REJECTED.items():
        try:
            wrong[where] = f"selects {log.find(where).total} rows"
        except ExpressionError as error:
            if why in str(error) and "\n" not in str(error):
                continue
            wrong[where] = str(error)
    assert wrong == {}


@settings(max_examples=50)
@given(
    st.text(max_size=60)
    | st.lists(st.sampled_from([*NAMES, *FUNCTIONS, "score.a", "<", "==", "in", "not", "(", ")", "1", "'a'"])).map(" ".join)
)
def test_any_text_is_a_condition_or_is_rejected(log: Search, text: str) -> None:
    with contextlib.suppress(ExpressionError):
        assert log.find(text).of == len(ROWS)
