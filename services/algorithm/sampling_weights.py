"""Turns a group's priority into its sampling weight. Shared by dataprep, which inserts groups, and the trainer, which updates
them.

Guarantees: a weight is finite and not negative, whatever the priority; 0 means "only when nothing else is left".
"""

from __future__ import annotations

import math

HEAVIEST = 1e9
"""Bound of a weight: ring times are doubles, and their steps must not vanish relative to the clock."""

LIGHTEST = 1e-9
"""Weights below this count as 0."""


def sampling_weight(priority: float, exponent: float) -> float:
    """Return priority ** exponent (Schaul et al. 2016, eq. 1), within LIGHTEST..HEAVIEST, or 0 for a priority of 0, below, or
    NaN. With an exponent of 0, every priority has weight 1.
    """
    if exponent == 0:
        return 1.0
    if not priority > 0:
        return 0.0
    weight = math.exp(min(max(exponent * math.log(min(priority, HEAVIEST)), -100.0), math.log(HEAVIEST)))
    return weight if weight >= LIGHTEST else 0.0
