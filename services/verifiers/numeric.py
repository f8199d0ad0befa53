"""Numbers that custom code returns: Python's, numpy's, and tensors without dimensions. No library of them is imported."""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

MOST_SCORE = 1e30
"""Largest magnitude of a score without a range: differences of rewards must fit into float32, and their squares into float64."""
MOST_PARTS = 32
"""Maximum number of numbers beside a score, each of which is a metric."""
PART = re.compile(r"[A-Za-z0-9_-]{1,40}")
"""Names of these."""


def number_of(value: Any) -> float | None:
    """Return a number as a float, or None for what is not a number: text, complex numbers, arrays, and integers too large."""
    if isinstance(value, str | bytes) or (isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real)):
        return None
    return tried(lambda: float(value) if hasattr(type(value), "__float__") and not getattr(value, "ndim", 0) else None)[0]


def tried(call: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return what a call returns, or None and what it raised: values of custom code may raise anything."""
    try:
        return call(), None
    except Exception as error:  # as above
        return None, error
