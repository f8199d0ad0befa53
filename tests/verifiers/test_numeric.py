"""What counts as a number among the values that custom code returns."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from services.verifiers.numeric import number_of


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0), (2, 2.0), (0.5, 0.5), (Decimal("0.5"), 0.5), (Fraction(1, 2), 0.5),
        (np.bool_(True), 1.0), (np.int64(3), 3.0), (np.float32(0.5), 0.5), (np.float64(0.5), 0.5), (np.array(2), 2.0),
        (torch.tensor(0.5), 0.5), (torch.tensor(True), 1.0),
    ],
)  # fmt: skip
def test_numbers_of_any_library_count(value: Any, expected: float) -> None:
    assert number_of(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        None, "1", b"1", np.str_("1"), np.bytes_(b"1"), 1j, np.complex64(1), [1.0], {"a": 1}, object(), 10**400,
        np.array([1.0]), np.array([1.0, 2.0]), np.datetime64("2026-01-01"), torch.tensor([1.0]),
    ],
)  # fmt: skip
def test_nothing_else_does(value: Any) -> None:
    assert number_of(value) is None
