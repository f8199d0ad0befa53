"""The parts of a completion, even if the columns that describe them are damaged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from services.operations.inspection.parts import read_parts
from services.operations.inspection.text import TextReader
from services.protocol.payloads import Payload

TOKENS = [7, 8, 9]


def parts(**columns: Any) -> list[tuple[bool, list[int] | None, float | None]]:
    """Return the parts of a segment of three tokens, with the seconds waited before each."""
    zeros = np.zeros((1, 4), np.int32)
    payload = Payload(np.zeros(1, np.int32), np.array([3], np.int32), np.array(TOKENS, np.int32), np.zeros(3), zeros, **columns)
    found = read_parts(payload, 0, TOKENS, TextReader(None))
    return [(part.sampled, part.passage.token_ids, part.waited_s) for part in found]


def test_turns_and_what_was_read_between_them_divide_a_segment() -> None:
    read, turns = np.array([[0, 1, 2]], np.int32), np.array([[0, 1, 0.5, 1], [0, 3, 2, 1]], np.float32)
    assert parts(tool_spans=read, turns=turns) == [(True, [7], 0.5), (False, [8], None), (True, [9], 2.0)]


@pytest.mark.parametrize(
    "columns",
    [
        {"turns": np.array([[0, np.nan, 1, 1]])},
        {"turns": np.array([[0, np.inf, 1, 1], [0, 3, np.nan, 1]])},
        {"tool_spans": np.array([[0, np.nan, 1]])},
        {"tool_spans": np.array([["0", "x", "1"]])},
        {"tool_spans": np.array([[0, -5, 99], [0, 2, 1]], np.int32), "turns": np.zeros((1, 2))},
        {"turns": np.array(1.0)},
    ],
)
def test_damaged_columns_divide_nothing(columns: dict[str, Any]) -> None:
    found = parts(**columns)
    assert [token for _, ids, _ in found for token in ids or ()] == TOKENS
    assert all(waited is None for _, _, waited in found)
