"""Which of two numbers follows the other: the run's wish, or the replicas of the generators' Deployment. Pure.

Guarantees: whoever changed last is followed: `grpo scale` and the endpoints change the wish, `kubectl scale` the replicas. If
both changed, the wish counts. A number that was followed once is never set back.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.store.records import Scale


@dataclass(frozen=True)
class Decision:
    """What is to be set; None: it stays."""

    replicas: int | None = None
    wish: int | None = None
    followed: int | None = None


def decide(scale: Scale, replicas: int) -> Decision:
    """Compare both numbers with the one they last agreed on, `scale.followed`."""
    if scale.wanted is not None and scale.wanted != scale.followed:
        return Decision(replicas=scale.wanted if scale.wanted != replicas else None, followed=scale.wanted)
    if scale.followed is None:
        return Decision(followed=replicas)
    if replicas != scale.followed:
        return Decision(wish=replicas, followed=replicas)
    return Decision()
