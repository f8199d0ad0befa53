"""How a cost grows with a size: the exponent of a power law, and its error. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np


def power_law(costs: Mapping[int, Sequence[float]]) -> list[float]:
    """Return the exponent of cost ~ size^b, by least squares over the logarithms of all samples: b minus two standard errors,
    b, and b plus two. Raises `ValueError` for fewer than three samples or two sizes."""
    points = [(np.log(size), np.log(cost)) for size, found in costs.items() for cost in found]
    if len(points) < 3 or len(costs) < 2:
        raise ValueError(f"an exponent needs at least three samples of two sizes, not {len(points)} of {len(costs)}")
    sizes, logs = np.array(points).T
    distances = sizes - sizes.mean()
    slope = float(distances @ logs / (distances @ distances))
    left = logs - logs.mean() - slope * distances
    error = float(np.sqrt(left @ left / (len(points) - 2) / (distances @ distances)))
    return [slope - 2 * error, slope, slope + 2 * error]


def growth(costs: Mapping[int, Sequence[float]]) -> list[float]:
    """Return the cost at the largest size over that at the smallest: minimum, ratio of medians, maximum."""
    first, last = costs[min(costs)], costs[max(costs)]
    return [min(last) / max(first), statistics.median(last) / statistics.median(first), max(last) / min(first)]


def relative(costs: Mapping[int, Sequence[float]]) -> list[tuple[float, float]]:
    """Return size and cost, each over that of the smallest size."""
    first = statistics.median(costs[min(costs)])
    return [(size / min(costs), round(statistics.median(costs[size]) / first, 4)) for size in sorted(costs)]
