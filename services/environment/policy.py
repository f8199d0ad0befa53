"""What samples the tokens of a rollout's turns."""

from __future__ import annotations

from typing import Protocol

from services.rollouts.generated import Generated, SamplingParameters


class TurnPolicy(Protocol):
    """The policy as it is being trained, wherever it runs."""

    async def sample(self, request_id: str, tokens: list[int], seed: int, sampling: SamplingParameters) -> Generated:
        """Return what follows `tokens`, the whole context; its finish is never "aborted". Raises `GenerationFailed`."""
        ...
