"""The curriculum hook: a function that selects and orders the rows of every epoch of a source.

Guarantees: a hook returns some of the rows it was given, at least one and none twice; any other result, and any exception
it raises, becomes a `DataError` that names `data.curriculum`. The pass rates that a hook sees do not depend on timing
(`order.PromptOrder`), so a run is repeatable if the hook is a function of its arguments.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

import numpy as np

from services.chat.errors import DataError
from services.runtime.own_code import reported_as

Curriculum = Callable[[np.ndarray, np.ndarray, int], np.ndarray]
"""(rows [n] int32 in the epoch's seeded order, rates [n] float64 of the largest reward, NaN: unknown; epoch) -> rows to ask."""


def middle_first(rows: np.ndarray, rates: np.ndarray, epoch: int) -> np.ndarray:
    """Order rows by how near their pass rate is to 0.5, where groups differ most; unknown rates count as 0.25 away."""
    return rows[np.argsort(np.nan_to_num(np.abs(rates - 0.5), nan=0.25), kind="stable")]


def easy_first(rows: np.ndarray, rates: np.ndarray, epoch: int) -> np.ndarray:
    """Order rows by descending pass rate; unknown rates count as 0.5."""
    return rows[np.argsort(-np.nan_to_num(rates, nan=0.5), kind="stable")]


def load_curriculum(name: str) -> Curriculum | None:
    """Return the function that `data.curriculum` names, or None for an empty name. Raises `DataError`."""
    if not name:
        return None
    module, _, function = name.partition(":")
    with reported_as(lambda why: DataError(f"data.curriculum = {name!r} cannot be loaded ({why}): fix the name or its module")):
        curriculum = getattr(importlib.import_module(module), function)
    try:
        inspect.signature(curriculum).bind(None, None, 0)
    except (TypeError, ValueError) as error:
        raise DataError(f"data.curriculum = {name!r} is not a function of (rows, rates, epoch): {error}") from None
    return curriculum


def arrange(curriculum: Curriculum, rows: np.ndarray, rates: np.ndarray, epoch: int) -> np.ndarray:
    """Return the rows [<= n] int32 that the hook selects from `rows` [n] int32, in its order. Raises `DataError`."""
    with reported_as(lambda why: DataError(f"data.curriculum failed at epoch {epoch}; fix it: {why}")):
        chosen = np.asarray(curriculum(rows.copy(), rates.copy(), epoch))
    if chosen.ndim != 1 or not np.issubdtype(chosen.dtype, np.integer):
        fault = f"an array of shape {chosen.shape} and type {chosen.dtype} instead of integers [<= n]"
    elif not chosen.size:
        fault = "no rows"
    elif len(np.unique(chosen)) < len(chosen):
        fault = "a row twice"
    elif not np.isin(chosen, rows).all():
        fault = f"row {chosen[~np.isin(chosen, rows)][0]}, which it was not given"
    else:
        return chosen.astype(np.int32)
    raise DataError(f"data.curriculum returned {fault} at epoch {epoch}: return some of the given rows, each at most once")
