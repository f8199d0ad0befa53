"""The curriculum hook: a function that chooses and orders the rows of every epoch of a source.

Guarantees: what a hook returns is some of the rows it was given, at least one, none twice; anything else, and anything it
raises, is a `DataError` that names `data.curriculum`. A hook sees pass rates that do not depend on timing
(`order.PromptOrder`), so as long as it is a function of its arguments a run can be repeated.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

import numpy as np

from services.dataprep.prompts.errors import DataError

Curriculum = Callable[[np.ndarray, np.ndarray, int], np.ndarray]
"""(rows [n] int32 in the epoch's seeded order, rates [n] float64 of the largest reward, NaN: unknown; epoch) -> rows to ask."""


def middle_first(rows: np.ndarray, rates: np.ndarray, epoch: int) -> np.ndarray:
    """Rows whose pass rate is nearest 0.5 first, where groups differ most; unknown ones count as 0.25 away."""
    return rows[np.argsort(np.nan_to_num(np.abs(rates - 0.5), nan=0.25), kind="stable")]


def easy_first(rows: np.ndarray, rates: np.ndarray, epoch: int) -> np.ndarray:
    """Rows of the highest pass rate first; unknown ones count as 0.5."""
    return rows[np.argsort(-np.nan_to_num(rates, nan=0.5), kind="stable")]


def load_curriculum(name: str) -> Curriculum | None:
    """The function that `data.curriculum` names; None for an empty name. Raises `DataError`."""
    if not name:
        return None
    module, _, function = name.partition(":")
    try:
        curriculum = getattr(importlib.import_module(module), function)
    except Exception as error:  # a module of somebody else's, which may raise anything while it is imported
        raise DataError(f"data.curriculum = {name!r} cannot be loaded ({_line(error)}): correct it or its module") from error
    try:
        inspect.signature(curriculum).bind(None, None, 0)
    except (TypeError, ValueError) as error:
        raise DataError(f"data.curriculum = {name!r} is no function of (rows, rates, epoch): {error}") from None
    return curriculum


def arrange(curriculum: Curriculum, rows: np.ndarray, rates: np.ndarray, epoch: int) -> np.ndarray:
    """Rows [<= n] int32 of the epoch as the hook wants them, out of `rows` [n] int32. Raises `DataError`."""
    try:
        chosen = np.asarray(curriculum(rows.copy(), rates.copy(), epoch))
    except Exception as error:  # a function of somebody else's may raise anything
        raise DataError(f"data.curriculum failed at epoch {epoch}, mend it: {_line(error)}") from error
    if chosen.ndim != 1 or not np.issubdtype(chosen.dtype, np.integer):
        fault = f"an array of shape {chosen.shape} and type {chosen.dtype}, not of integers [<= n]"
    elif not chosen.size:
        fault = "no row"
    elif len(np.unique(chosen)) < len(chosen):
        fault = "a row twice"
    elif not np.isin(chosen, rows).all():
        fault = f"row {chosen[~np.isin(chosen, rows)][0]}, which it was not given"
    else:
        return chosen.astype(np.int32)
    raise DataError(f"data.curriculum returned {fault}, at epoch {epoch}: let it return some of its rows, each once")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
