"""Advantages over a full group, and which of its completions are trained on.

Guarantees: statistics are those of the whole group, and a mask removes completions afterwards without changing the advantages of
the others. All arrays share one index: the sample's place in the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

Kind = Literal["centered", "standard", "maxrl", "rloo"]

STD_EPSILON = 1e-8
"""Added to the standard deviation (docs/semantics.md)."""


def advantages(rewards: Sequence[float] | np.ndarray, kind: Kind) -> np.ndarray:
    """Return the advantages [n] float64 of the rewards [n] of one group; formulas in docs/semantics.md.

    A group of equal rewards has advantages 0, exactly. Rewards are taken relative to the first, so that a large common part does
    not round away their differences.

    `maxrl` is defined for rewards that are not negative. A group of mean 0 or below has advantages 0, since dividing by a
    negative mean would turn the better completions into the worse ones. Rewards of both signs may have a mean close to 0; the
    quotients are bounded by -1 and n - 1, which those of rewards that are not negative never leave.
    """
    r = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(r).all():
        raise ValueError(f"rewards must be finite, not {r.tolist()}")
    if kind == "rloo" and r.size < 2:
        raise ValueError("rloo compares a completion with the others of its group: a group needs at least 2")
    if constant(r):
        return np.zeros_like(r)
    offsets = r - r[0]
    centered = offsets - offsets.mean()
    if kind == "centered":
        return centered
    if kind == "standard":
        return centered / (offsets.std() + STD_EPSILON)
    if kind == "maxrl":
        mean = r[0] + offsets.mean()
        return (centered / mean).clip(-1.0, r.size - 1.0) if mean > 0 else np.zeros_like(r)
    return centered * (r.size / (r.size - 1))  # r_i - mean of the others = (r_i - mean) n / (n - 1)


def trained(truncated: Sequence[bool] | np.ndarray, mask_truncated: bool) -> np.ndarray:
    """Return the mask [n] of the completions that are trained on."""
    return ~np.asarray(truncated, dtype=bool) if mask_truncated else np.ones(len(truncated), dtype=bool)


def constant(rewards: Sequence[float] | np.ndarray) -> bool:
    """Return whether all completions of a group earned the same reward, so that there is nothing to learn from it."""
    r = np.asarray(rewards, dtype=np.float64)
    return bool((r == r[0]).all())
