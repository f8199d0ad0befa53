"""Numbers that custom code returns: Python's, numpy's, and tensors without dimensions. No library of them is imported."""

from __future__ import annotations

import numbers
from typing import Any


def number_of(value: Any) -> float | None:
    """Return a number as a float, or None for what is not a number: text, complex numbers, arrays, and integers too large."""
    if isinstance(value, str | bytes) or (isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real)):
        return None
    try:
        return float(value) if hasattr(type(value), "__float__") and not getattr(value, "ndim", 0) else None
    except Exception:  # a value of one's own may raise anything here
        return None
