"""Positions encoded on a device have the same bytes as in a version store, and invalid ones are rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.weights.sparse.changes import bits, changed_positions, decode_gaps, encode_gaps
from services.weights.versions import positions as host
from services.weights.versions.positions import InvalidVersion
from tests.weights.versions.test_pieces import special

COUNT = 3000


@st.composite
def chosen(draw: st.DrawFn) -> np.ndarray:
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    return np.flatnonzero(random.random(COUNT) < draw(st.sampled_from((0.0, 0.0004, 0.003, 0.02, 0.5, 1.0))))


@settings(max_examples=150, deadline=None)
@given(chosen())
def test_positions_have_the_same_bytes_as_on_the_host(positions: np.ndarray) -> None:
    encoded = encode_gaps(torch.from_numpy(positions))
    assert np.array_equal(encoded.numpy(), host.encode_gaps(positions))
    assert torch.equal(decode_gaps(encoded, positions.size, COUNT), torch.from_numpy(positions))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from((0, 1, 7, 254, 255)), max_size=40), st.integers(0, 40), st.integers(0, 4000))
def test_exactly_the_positions_rejected_by_the_host_are_rejected(listed: list[int], changed: int, count: int) -> None:
    encoded = np.array(listed, np.uint8)
    assert decoded_by(decode_gaps, torch.from_numpy(encoded), changed, count) == decoded_by(
        host.decode_gaps, encoded, changed, count
    )


def decoded_by(decode: Any, *given: Any) -> list[int] | str:
    try:
        return decode(*given).tolist()
    except InvalidVersion as error:
        return str(error)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits_are_compared_instead_of_values(dtype: torch.dtype) -> None:
    values = special(dtype)
    zeros = torch.zeros_like(values)
    assert changed_positions(bits(values), bits(values)).numel() == 0, "a NaN equals itself"
    differing = changed_positions(bits(values), bits(zeros)).tolist()
    assert differing == [i for i in range(len(values)) if i != 1], "all but +0, including -0"
