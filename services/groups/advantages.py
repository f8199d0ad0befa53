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
EQUAL_SHARE = 1e-6
"""Rewards that differ by at most this share of the largest magnitude are equal: several times what float32 resolves."""


def equal(rewards: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return for groups of rewards [..., n] whether all rewards of the group are equal [...]."""
    r = np.asarray(rewards, dtype=np.float64)
    return r.max(axis=-1) - r.min(axis=-1) <= EQUAL_SHARE * np.abs(r).max(axis=-1)


def advantages(rewards: Sequence[float] | np.ndarray, kind: Kind) -> np.ndarray:
    """Return the advantages [..., n] float64 of the rewards [..., n] of groups of n; formulas in docs/semantics.md.

    Rewards are taken relative to the first, so that a large common part does not round away their differences. `equal` rewards
    have advantages 0, exactly.

    `maxrl` is defined for rewards that are not negative. A group of mean 0 or below has advantages 0, since dividing by a
    negative mean would turn the better completions into the worse ones. Rewards of both signs may have a mean close to 0; the
    quotients are bounded by -1 and n - 1, which those of rewards that are not negative never leave.
    """
    r = np.asarray(rewards, dtype=np.float64)
    n = r.shape[-1]
    if not np.isfinite(r).all():
        raise ValueError(f"rewards must be finite, not {r.tolist()}")
    if kind == "rloo" and n < 2:
        raise ValueError("rloo compares a completion with the others of its group: a group needs at least 2")
    first = r[..., :1]
    offsets = r - first
    means = offsets.mean(axis=-1, keepdims=True)
    found = offsets - means
    if kind == "standard":
        found /= offsets.std(axis=-1, keepdims=True) + STD_EPSILON
    elif kind == "maxrl":
        positive = first + means > 0
        found = np.where(positive, (found / np.where(positive, first + means, 1.0)).clip(-1.0, n - 1.0), 0.0)
    elif kind == "rloo":
        found *= n / (n - 1)  # r_i - mean of the others = (r_i - mean) n / (n - 1)
    return np.where(equal(r)[..., None], 0.0, found)


def trained(truncated: Sequence[bool] | np.ndarray, mask_truncated: bool) -> np.ndarray:
    """Return the mask [n] of the completions that are trained on."""
    return ~np.asarray(truncated, dtype=bool) if mask_truncated else np.ones(len(truncated), dtype=bool)
