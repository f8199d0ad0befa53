"""Gaps survive in a byte to 5 %, and bytes of any other form give no gaps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.protocol import codec
from services.protocol.logprob_gaps import LogprobGaps
from services.trainer.step.logprob_gaps import codes


def through(gaps: list[float]) -> list[float]:
    made = LogprobGaps(["0-0.1"], [0], [len(gaps)], codes([torch.tensor(gaps)]).numpy().tobytes())
    decoded = codec.decode(codec.unseal(codec.seal(codec.encode(made))), LogprobGaps)
    return decoded.by_segment()["0-0.1", 0].tolist()


@given(st.lists(st.floats(-16, 16, width=32), min_size=1, max_size=20))
def test_a_gap_is_known_to_five_percent(gaps: list[float]) -> None:
    assert through(gaps) == pytest.approx(gaps, rel=0.05, abs=1e-4)


def test_gaps_that_are_none_or_beyond_the_range() -> None:
    nan, *others = through([float("nan"), 0.0, 1e-6, -1e-6, 100.0, -1e9])
    assert np.isnan(nan)
    assert others == pytest.approx([0, 0, 0, 16.4, -16.4], rel=0.01)
    assert np.isnan(through([float("inf"), -float("inf")])).all()


def test_a_row_without_tokens_has_no_code() -> None:
    assert codes([torch.zeros(0), torch.ones(2), torch.zeros(0)]).shape == (2,)
    assert LogprobGaps([], [], [], b"").by_segment() == {}


@pytest.mark.parametrize(
    "columns",
    [
        ([], [0], [1], b"a"),
        (["p"], [0], [2], b"a"),
        (["p"], [0], [-1], b""),
        (["p", "q"], [0, 0], [2, -1], b"a"),
        (["p"], [0], [], b""),
    ],
)
def test_columns_that_do_not_fit_together_give_nothing(columns: tuple[list[str], list[int], list[int], bytes]) -> None:
    assert LogprobGaps(*columns).by_segment() == {}
