"""Histograms as metrics of a step: `histogram/<what>/<scope>/<upper bound>` is the number of values above the previous bound and
up to this one. Empty bins are left out. Pure.

Counts of fixed bins add up over rows, ranks and mini-batches, and every metric stays a number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

PREFIX = "histogram/"
BOUNDS: dict[str, tuple[float, ...]] = {
    "reward": (-10, -3, -1, -0.75, -0.5, -0.25, -0.1, 0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.5, 2, 3, 10),
    "length": tuple(2**power for power in range(3, 19)),
    "advantage": (-3, -2, -1.5, -1, -0.75, -0.5, -0.25, -0.1, 0, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3),
    "ratio": (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1, 1.01, 1.02, 1.05, 1.1, 1.2, 1.3, 1.5, 2),
    "logprob_gap": (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3),
}
"""Upper bounds of the bins, ascending; a last bin, `inf`, has everything above them."""

T = TypeVar("T", float, float | None)
Bins = list[tuple[float, float]]
"""Upper bound and count of each bin that is not empty, ascending."""


def named(what: str, scope: str, counts: Sequence[float]) -> dict[str, float]:
    """Return the metrics of a histogram from the counts of all its bins."""
    bounds = (*BOUNDS[what], float("inf"))
    return {f"{PREFIX}{what}/{scope}/{bound:g}": float(count) for bound, count in zip(bounds, counts, strict=True) if count > 0}


def counted(what: str, scope: str, values: Iterable[float]) -> dict[str, float]:
    """Return the metrics of the histogram of `values`."""
    counts = [0] * (len(BOUNDS[what]) + 1)
    for value in values:
        counts[bisect_left(BOUNDS[what], value)] += 1
    return named(what, scope, counts)


def separated(record: Mapping[str, T]) -> tuple[dict[str, T], dict[str, Bins]]:
    """Return a record without its histograms, and these by name, `histogram/<what>/<scope>`."""
    plain, found = dict[str, T](), dict[str, Bins]()
    for name, value in record.items():
        histogram, _, bound = name.rpartition("/")
        if not name.startswith(PREFIX):
            plain[name] = value
        elif (upper := _number(bound)) is not None and value is not None:
            found.setdefault(histogram, []).append((upper, value))
    return plain, {name: sorted(bins) for name, bins in found.items()}


def edges(what: str, bins: Bins) -> tuple[list[float], list[float]]:
    """Return ascending finite edges and the counts between them, from the first bin that is not empty to the last one.

    The bin without a lower bound begins one width of its neighbour below its upper bound, and the one without an upper bound ends
    one above.
    """
    bounds = BOUNDS[what]
    whole = [2 * bounds[0] - bounds[1], *bounds, 2 * bounds[-1] - bounds[-2]]
    counts = dict(bins)
    every = [counts.get(float(bound), 0.0) for bound in (*bounds, float("inf"))]
    filled = [place for place, count in enumerate(every) if count]
    if not filled:
        return [whole[0], whole[1]], [0.0]
    return [float(edge) for edge in whole[filled[0] : filled[-1] + 2]], every[filled[0] : filled[-1] + 1]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
