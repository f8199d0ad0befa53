"""Decides which of two numbers follows the other: the requested generators, or their Deployment's replicas. Pure.

Guarantees: the last change wins. `grpo scale` and the endpoints change the request, `kubectl scale` changes the replicas. If
both changed, the request wins. A number that was once followed is never set back.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.store.records import Scale


@dataclass(frozen=True)
class Decision:
    """What to set; None means leave unchanged."""

    replicas: int | None = None
    wish: int | None = None
    followed: int | None = None


def decide(scale: Scale, replicas: int) -> Decision:
    """Compare both numbers with `scale.followed`, on which they last agreed."""
    if scale.wanted is not None and scale.wanted != scale.followed:
        return Decision(replicas=scale.wanted if scale.wanted != replicas else None, followed=scale.wanted)
    if scale.followed is None:
        return Decision(followed=replicas)
    if replicas != scale.followed:
        return Decision(wish=replicas, followed=replicas)
    return Decision()
