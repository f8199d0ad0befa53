"""Turns a group's priority into its sampling weight. Shared by dataprep, which inserts groups, and the trainer, which updates
them.

Guarantees: a weight is finite and not negative, whatever the priority; 0 means "only when nothing else is left".
"""

from __future__ import annotations

HEAVIEST = 1e9
"""Bound of a weight: ring times are doubles, and their steps must not vanish relative to the clock."""

LIGHTEST = 1e-9
"""Weights below this count as 0."""


def sampling_weight(priority: float) -> float:
    """Return the weight of a priority (Schaul et al. 2016, eq. 1, with an exponent of 1): the priority itself within
    LIGHTEST..HEAVIEST, or 0 for one below, or NaN.
    """
    return min(priority, HEAVIEST) if priority >= LIGHTEST else 0.0
