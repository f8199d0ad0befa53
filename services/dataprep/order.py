"""The order of prompts: a seeded permutation of the rows for each epoch.

Guarantees: the order is a function of (seed, epoch, n) alone, the same on every platform and with every numpy, since it is
made of 64-bit integer arithmetic and a stable sort; an interrupted run that resumes meets the rows it would have met.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np


def permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    """Rows [n] int32 in the order of the epoch: rows sorted by one SplitMix64 number each (Steele et al. 2014), ties by row."""
    start = int.from_bytes(hashlib.sha256(f"order {seed} {epoch}".encode()).digest()[:8], "little")
    with np.errstate(over="ignore"):
        z = np.uint64(start) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return np.argsort(z, kind="stable").astype(np.int32)


class PromptOrder:
    """Which (epoch, row) stands at each position of a run. Keeps the permutations of two epochs, whatever their number."""

    def __init__(self, rows: int, seed: int, shuffle: bool) -> None:
        self._rows = rows
        self._epoch = lru_cache(maxsize=2)(
            lambda epoch: permutation(seed, epoch, rows) if shuffle else np.arange(rows, dtype=np.int32)
        )

    def at(self, position: int) -> tuple[int, int]:
        """Epoch and row of the run's prompt number `position`, from 0."""
        epoch, offset = divmod(position, self._rows)
        return epoch, int(self._epoch(epoch)[offset])
