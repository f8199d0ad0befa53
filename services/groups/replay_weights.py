"""Weights of groups in the replay table, and the random variates of their clocks. Shared by dataprep, which inserts groups, and
the trainer, which updates their weights. Pure.

Guarantees: random numbers depend only on names such as (seed, group, number of the draw), so that a draw can be repeated and no
random state must be saved; weights are finite and not negative, whatever the priority; importance weights are between 0 and 1.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from services.config import RunConfig
from services.groups.advantages import trained
from services.protocol.messages import Header

HEAVIEST = 1e9
"""Bound of a weight: ring times are doubles, and their steps must not vanish relative to the clock."""

LIGHTEST = 1e-9
"""Weights below this count as 0."""

HALVINGS = 16
"""Versions, each of which halves a weight by recency, after which these weights are rescaled. 2^16 keeps the clocks' steps far
above the precision of a double."""


def drawn(bits: int, *names: object) -> int:
    """Return a number of `bits` bits, a multiple of 8, that depends only on the names."""
    digest = hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=bits // 8).digest()
    return int.from_bytes(digest, "little")


def uniform(seed: int, group: str, use: str) -> float:
    """Return a number in (0, 1) of 52 bits, a function of the arguments alone."""
    return ((drawn(64, seed, group, use) >> 12) + 0.5) / 2**52  # with a bit more, the sum may be rounded to 1


def exponential(seed: int, group: str, draw: int) -> float:
    """Return an Exp(1) variate: how long the group's clock runs before draw number `draw`, at weight 1."""
    return -math.log(uniform(seed, group, str(draw)))


def sampling_weight(priority: float) -> float:
    """Return the weight of a priority (Schaul et al. 2016, eq. 1, with an exponent of 1): the priority itself within
    LIGHTEST..HEAVIEST, or 0 for one below, or NaN.
    """
    return min(priority, HEAVIEST) if priority >= LIGHTEST else 0.0


def recency_base(step: int) -> int:
    """Return the policy version that recency weights are relative to at a step."""
    return step // HALVINGS * HALVINGS


def recency_weight(versions: int) -> float:
    """Return the weight of a group `versions` policy versions younger than one of weight 1, within 2^-1022..2^1023."""
    return 2.0 ** min(max(versions, -1022), 1023)


def weight(header: Header, given: np.ndarray, config: RunConfig, base: int) -> float:
    """Return the sampling weight of a new group; `given` [n] are its advantages, `base` is as in `recency_base`."""
    match config.replay.priority:
        case "recency":
            return sampling_weight(recency_weight(min(header.oldest) - base))
        case "reward":
            priority = float(sum(header.rewards))
        case _:  # also `trainer`, until the trainer has trained on the group
            mask = trained(header.truncated, config.advantage.mask_truncated)
            priority = float(np.abs(given[mask]).sum())
    return sampling_weight(priority)


def importance(weights: Sequence[float], beta: float) -> np.ndarray:
    """Return (N P)^-beta over the largest of these, [k], with P = weight / sum of weights (Schaul et al. 2016, section 3.4).

    That is (weight / smallest weight)^-beta: N and the sum, of the whole table, cancel. Groups of weight 0 count as the rarest of
    the others. A step draws without replacement, so heavy groups are drawn slightly less often than k independent draws of P
    would draw them, and are slightly overcorrected.
    """
    w = np.asarray(weights, dtype=np.float64)
    if not (w > 0).any():
        return np.ones(len(w))
    rarest = w[w > 0].min()
    return (np.where(w > 0, w, rarest) / rarest) ** -beta
