"""Arrow columns of the sample log, built from the values of a whole file at once.

Guarantees: a value that does not fit its column is null, and the others stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from services.operations.samples.columns import SCHEMA

_UNFIT = (pa.ArrowException, OverflowError, TypeError, ValueError)
"""Errors raised by values that do not fit their columns: numbers of an invalid header may have any size."""


def column(name: str, values: Any) -> Any:
    """Return the column of that name, from a sequence of values or an array."""
    return values if isinstance(values, pa.Array) else _array(values, SCHEMA.field(name).type)


def _array(values: Sequence[Any], kind: Any) -> Any:
    try:
        return pa.array(values, kind)
    except _UNFIT:
        return pa.array([value if _fits(value, kind) else None for value in values], kind)


def _fits(value: Any, kind: Any) -> bool:
    try:
        pa.array([value], kind)
    except _UNFIT:
        return False
    return True


class Ragged:
    """A column of lists of numbers, whose elements come group by group."""

    def __init__(self, kind: Any) -> None:
        """`kind`: numpy's type of the elements."""
        self._kind = kind
        self._lengths, self._missing, self._parts = list[int](), list[bool](), list[np.ndarray]()

    def add(self, count: int, lengths: Sequence[int], elements: np.ndarray | None) -> None:
        """Add `count` rows: the first of these lengths, whose elements come one row after the other, the others null. Without
        elements all are null.
        """
        held = 0 if elements is None else len(lengths)
        if elements is not None:
            self._lengths += lengths
            self._parts.append(elements[: sum(lengths)])
        self._lengths += [0] * (count - held)
        self._missing += [False] * held + [True] * (count - held)

    def elements(self) -> np.ndarray:
        """Return the elements of all rows."""
        return np.concatenate(self._parts) if self._parts else np.zeros(0, self._kind)

    def reduced(self, how: np.ufunc, elements: np.ndarray) -> np.ndarray:
        """Return the reduction of each row's elements, [rows]; 0 for rows without any."""
        lengths = np.array(self._lengths, np.int64)
        found, filled = np.zeros(len(lengths), elements.dtype), lengths > 0
        if filled.any():
            found[filled] = how.reduceat(elements, (np.cumsum(lengths) - lengths)[filled])
        return found

    def column(self, elements: np.ndarray | None = None, none: np.ndarray | None = None) -> Any:
        """Return the column, with other elements if they are given; `none`: further rows that are null, [rows]."""
        arrow: Any = pa
        whole = self.elements() if elements is None else elements
        lengths, missing = np.array(self._lengths, np.int32), np.array(self._missing, bool)
        if none is not None:
            missing |= none
            if lengths[missing].any():
                whole, lengths = whole[np.repeat(~missing, lengths)], np.where(missing, 0, lengths)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return arrow.ListArray.from_arrays(arrow.array(offsets), arrow.array(whole), mask=arrow.array(missing))


def maps(counts: Sequence[int], names: Sequence[str], values: Sequence[float]) -> Any:
    """Return a column of maps from names to numbers, with the given number of entries in each row."""
    arrow: Any = pa
    offsets = arrow.array(np.cumsum([0, *counts], dtype=np.int32))
    return arrow.MapArray.from_arrays(offsets, arrow.array(names, arrow.string()), arrow.array(values, arrow.float64()))
