"""`length`: a soft penalty for long completions, DAPO's overlong punishment (Yu et al. 2025, equation 13)."""

from __future__ import annotations

from services.config.verifiers import LengthConfig


class LengthVerifier:
    """Scores 0 up to `max_tokens - soft_tokens`, then falls linearly to -1 at `max_tokens`."""

    def __init__(self, config: LengthConfig, max_tokens: int) -> None:
        self._limit, self._soft = max_tokens, config.soft_tokens

    def score(self, tokens: list[int]) -> float:
        """Return the score in -1..0 of one completion."""
        return 0.0 - min(1.0, max(0, len(tokens) - (self._limit - self._soft)) / self._soft)
