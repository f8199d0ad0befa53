"""Distributes work evenly: groups over mini-batches, responses over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

TOLERANCE = 0.002
"""Swaps between ranks stop when the highest and the lowest load differ by at most this share of the mean."""
SWAPS_PER_RANK = 16
"""Maximum number of swaps per rank. Each may make one more rank fetch a payload."""


def deal(tokens: Sequence[int], parts: int) -> list[list[int]]:
    """Divide `tokens` into `parts` parts whose sizes differ by at most one and whose sums are similar; return places per part.

    Each item, largest first, goes to the part with the smallest sum among those that are not full; ties go by place. Places
    ascend within a part.
    """
    smallest, larger = divmod(len(tokens), parts)
    room = [smallest + (part < larger) for part in range(parts)]
    dealt: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for i in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        part = min((part for part in range(parts) if len(dealt[part]) < room[part]), key=lambda part: (sums[part], part))
        dealt[part].append(i)
        sums[part] += tokens[i]
    return [sorted(part) for part in dealt]


def spread(costs: np.ndarray, ranks: int, movable: np.ndarray | None = None) -> list[list[int]]:
    """Assign the places of `costs` [m] to `ranks` ranks, in contiguous stretches of equal cost, then even these out by moving and
    swapping single places: those that are `movable` ([m] bool), or all."""
    # A response belongs to the rank whose stretch contains its middle.
    middle = np.cumsum(costs) - costs / 2
    owner = np.minimum((middle * ranks / max(1, costs.sum())).astype(np.int64), ranks - 1)
    mean = costs.sum() / ranks
    movable = np.ones(len(costs), bool) if movable is None else movable
    loads = np.bincount(owner, weights=costs, minlength=ranks)
    for _ in range(SWAPS_PER_RANK * ranks):
        high, low = int(np.argmax(loads)), int(np.argmin(loads))
        if loads[high] - loads[low] <= TOLERANCE * mean or not _even_out(costs, owner, movable, loads, high, low):
            break
    return [np.flatnonzero(owner == rank).tolist() for rank in range(ranks)]


def _even_out(costs: np.ndarray, owner: np.ndarray, movable: np.ndarray, loads: np.ndarray, high: int, low: int) -> bool:
    """Move one place from `high` to `low`, or swap two, so that the transfer is as close as possible to half the gap."""
    gap = loads[high] - loads[low]
    mine = np.flatnonzero((owner == high) & movable)
    theirs = np.flatnonzero((owner == low) & movable)
    if not len(mine):
        return False
    theirs = theirs[np.argsort(costs[theirs], kind="stable")]
    offers = np.concatenate(([0], costs[theirs]))  # 0: move a place without taking one in return
    wanted = costs[mine] - gap / 2
    at = np.minimum(cast("np.ndarray", np.searchsorted(offers, wanted)), len(offers) - 1)
    below = np.maximum(at - 1, 0)
    at = np.where(np.abs(offers[at] - wanted) <= np.abs(offers[below] - wanted), at, below)
    closed = costs[mine] - offers[at]  # load that moves from high to low
    after = np.abs(gap - 2 * closed)
    best = int(np.argmin(after))
    if after[best] >= gap:
        return False
    owner[mine[best]] = low
    if at[best] > 0:
        owner[theirs[at[best] - 1]] = high
    loads[high] -= closed[best]
    loads[low] += closed[best]
    return True
