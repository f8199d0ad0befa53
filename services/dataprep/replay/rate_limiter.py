"""Limits the average number of draws per inserted group: Reverb's `SampleToInsertRatio` (Cassirer et al. 2021, section 3.3).

Guarantees: samples_per_insert x inserts - draws stays within `error_buffer` of samples_per_insert x min_size, in both
directions, if both sides ask first; a step of `prompts_per_step` draws and a single insert are never both refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.config import RunConfig


@dataclass(frozen=True)
class RateLimiter:
    """The target ratio of a run and its tolerance."""

    samples_per_insert: float
    min_size: int
    error_buffer: float
    """Draws by which the ratio may be missed in either direction."""

    @property
    def _centre(self) -> float:
        return self.samples_per_insert * self.min_size

    def draws(self, inserted: int, drawn: int, count: int) -> bool:
        """Return whether `count` draws may be made now."""
        return inserted * self.samples_per_insert - drawn - count >= self._centre - self.error_buffer - 1e-9

    def inserts(self, inserted: int, drawn: int) -> int:
        """Return how many groups may be inserted now."""
        room = self._centre + self.error_buffer + drawn - inserted * self.samples_per_insert
        return max(0, math.floor(room / self.samples_per_insert + 1e-9))


def rate_limiter(config: RunConfig) -> RateLimiter | None:
    """Return the limiter of a run, or None if `replay.samples_per_insert` is 0.

    Its error buffer is the smallest with which a step's draws and an insert are never both refused.
    """
    replay = config.replay
    if not replay.samples_per_insert:
        return None
    error_buffer = (config.admission.prompts_per_step + replay.samples_per_insert) / 2
    return RateLimiter(replay.samples_per_insert, replay.min_size, error_buffer)
