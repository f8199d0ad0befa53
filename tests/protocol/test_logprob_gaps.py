"""A gap is encoded in a byte with an error of at most 5 %, and invalid bytes yield no gaps."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from services.protocol import codec
from services.protocol.errors import StoreError
from services.protocol.logprob_gaps import LogprobGaps
from services.runtime.portal import Portal
from services.trainer.step.logprob_gaps import GapSender, codes


def through(gaps: list[float]) -> list[float]:
    made = LogprobGaps(["0-0.1"], [0], [len(gaps)], codes([torch.tensor(gaps)]).numpy().tobytes())
    decoded = codec.decode(codec.unseal(codec.seal(codec.encode(made))), LogprobGaps)
    return decoded.by_segment()["0-0.1", 0].tolist()


@given(st.lists(st.floats(-16, 16, width=32), min_size=1, max_size=20))
def test_gaps_are_accurate_to_five_percent(gaps: list[float]) -> None:
    assert through(gaps) == pytest.approx(gaps, rel=0.05, abs=1e-4)


def test_nan_zero_and_out_of_range_gaps() -> None:
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
def test_inconsistent_columns_give_no_gaps(columns: tuple[list[str], list[int], list[int], bytes]) -> None:
    assert LogprobGaps(*columns).by_segment() == {}


@pytest.mark.parametrize(("fault", "level"), [(StoreError("away"), "info"), (KeyError("a bug"), "warning")])
def test_unsent_gaps_are_logged_and_block_nothing(fault: Exception, level: str) -> None:
    store: Any = MagicMock()
    store.samples.send_gaps.side_effect = fault
    portal = Portal()
    try:
        with capture_logs() as logs:
            sender = GapSender(portal, store, 0, 1.0)
            for step in (1, 2):
                sender.begin(step, [], torch.zeros(0), 1)
                sender.close()
    finally:
        portal.close()
    assert [(entry["step"], entry["log_level"]) for entry in logs] == [(1, level), (2, level)]
