"""Curriculum hooks: the built-in ones, custom ones, and every snippet of docs/data.md."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.chat.errors import DataError
from services.config.load import validate
from services.dataprep.prompts.curriculum import Curriculum, arrange, easy_first, load_curriculum, middle_first

DOCUMENT = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
ROWS = np.array([7, 4, 9, 5, 6], np.int32)
RATES = np.array([1.0, np.nan, 0.0, 0.5, 0.7])


def snippets(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)


def test_middle_first_asks_unknown_rows_before_the_ends():
    assert middle_first(ROWS, RATES, 1).tolist() == [5, 6, 4, 7, 9]
    assert middle_first(ROWS, np.full(5, np.nan), 0).tolist() == ROWS.tolist()


def test_easy_first_puts_unknown_rows_in_the_middle():
    assert easy_first(ROWS, RATES, 1).tolist() == [7, 6, 4, 5, 9]
    assert easy_first(ROWS, np.full(5, np.nan), 0).tolist() == ROWS.tolist()


@given(st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=30), st.integers(0, 3))
def test_built_in_curricula_ask_every_row(rates: list[float | None], epoch: int):
    rows = np.arange(len(rates), dtype=np.int32)[::-1]
    for curriculum in (middle_first, easy_first):
        asked = arrange(curriculum, rows, np.array([np.nan if rate is None else rate for rate in rates]), epoch)
        assert sorted(asked.tolist()) == sorted(rows.tolist())
        assert asked.dtype == np.int32


@pytest.mark.parametrize(
    ("curriculum", "message"),
    [
        (lambda rows, rates, epoch: rows[:0], "returned no rows at epoch 3"),
        (lambda rows, rates, epoch: [7, 7], "returned a row twice"),
        (lambda rows, rates, epoch: [7, 8], "returned row 8, which it was not given"),
        (lambda rows, rates, epoch: rates, r"returned an array of shape \(5,\) and type float64 instead of integers"),
        (lambda rows, rates, epoch: rows[:, None], r"returned an array of shape \(5, 1\)"),
        (lambda rows, rates, epoch: None, r"returned an array of shape \(\)"),
        (lambda rows, rates, epoch: rows[rates], r"failed at epoch 3; fix it: IndexError: "),
        (lambda rows, rates, epoch: [[1], [2, 3]], r"failed at epoch 3; fix it: ValueError: "),
    ],
)
def test_an_invalid_result_of_a_hook_is_named(curriculum: Curriculum, message: str):
    with pytest.raises(DataError, match=f"data\\.curriculum {message}") as caught:
        arrange(curriculum, ROWS, RATES, 3)
    assert "\n" not in str(caught.value)


def test_a_hook_cannot_change_its_arguments():
    def sort(rows: np.ndarray, rates: np.ndarray, epoch: int) -> np.ndarray:
        rows.sort()
        rates[:] = 0
        return rows[:2]

    rows, rates = ROWS.copy(), RATES.copy()
    assert arrange(sort, rows, rates, 0).tolist() == [4, 5]
    assert np.array_equal(rows, ROWS)
    assert np.array_equal(rates, RATES, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.such:hook", r"'no\.such:hook' cannot be loaded \(ModuleNotFoundError: "),
        ("services.dataprep.prompts.curriculum:hard_first", r"cannot be loaded \(AttributeError: .*hard_first"),
        (
            "services.dataprep.prompts.curriculum:load_curriculum",
            r"is not a function of \(rows, rates, epoch\): too many positional",
        ),
        ("services.dataprep.prompts.curriculum:Curriculum", r"is not a function of \(rows, rates, epoch\)"),
        ("services.dataprep.prompts.order:RATE_SLACK", r"is not a function of \(rows, rates, epoch\)"),
    ],
)
def test_an_unusable_hook_is_named_before_the_run_starts(name: str, message: str):
    with pytest.raises(DataError, match=r"data\.curriculum = .*" + message):
        load_curriculum(name)


def test_hooks_are_loaded_by_name():
    assert load_curriculum("services.dataprep.prompts.curriculum:easy_first") is easy_first
    assert load_curriculum("") is None


def test_the_pages_snippets_are_valid_configurations():
    whole, rest = dict[str, Any](), dict[str, Any]()
    for text in snippets("toml"):
        tree = tomllib.loads(text)
        if "verifiers" in tree:
            whole = validate({"model": {"path": "m"}, **tree}, "docs/data.md").model_dump()
        else:
            rest = {**rest, **{section: {**rest.get(section, {}), **values} for section, values in tree.items()}}
    assert [source["name"] for source in whole["data"]["sources"]] == ["gsm8k", "sums"]
    config = validate({**whole, **{section: {**whole[section], **values} for section, values in rest.items()}}, "docs/data.md")
    assert (config.data.long_prompts, config.filters.exclude_pass_rate) == ("drop", 0.9)
    assert config.thresholds("gsm8k") == {"math": 1.0, "regex": 1.0}
    assert load_curriculum(config.data.curriculum) is middle_first


def test_the_pages_hook_works_as_described():
    (text,) = snippets("python")
    scope: dict[str, Callable[..., Any]] = {}
    exec(text, scope)
    assert arrange(scope["not_yet"], ROWS, RATES, 0).tolist() == ROWS.tolist()
    assert arrange(scope["not_yet"], ROWS, RATES, 1).tolist() == [7, 4, 5, 6]
    assert arrange(scope["not_yet"], ROWS, np.zeros(5), 1).tolist() == ROWS.tolist()
