"""Decides the numbers of pods of generators, trainer and judge, and which of two numbers follows the other. Pure.

Guarantees: the last change wins. `grpo scale` and the endpoints change the request, `kubectl scale` changes the replicas. If
both changed, the request wins. A number that was once followed is never set back, neither by an upgrade nor by a rollback: no
manifest names it. Objects that were emptied when a run finished get their numbers back, in the same run or the next one of the
release; objects that an operator scaled to zero do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.store.records import Scale

UNSET = 1
"""The replicas that a cluster gives an object whose manifest names none."""


@dataclass(frozen=True)
class Decision:
    """What to set; None means leave unchanged."""

    replicas: int | None = None
    requested: int | None = None
    followed: int | None = None
    object: str | None = None


def decide(scale: Scale, replicas: int, object: str = "", initial: int = UNSET, emptied: bool = False) -> Decision:
    """Compare both numbers with `scale.followed`, on which they last agreed for the Deployment `object`.

    A Deployment that the run has not followed yet, or that was `emptied` when a run finished, gets the requested number or,
    without a request, `initial`; unless another number was set in the meantime, which then applies. A request from before the
    first comparison wins in any case: the scaler itself sets `initial` before the run exists.
    """
    new = object if emptied or object != (scale.object or "") else None
    early = scale.wanted is not None and scale.followed is None
    if new and (early or untouched(replicas, emptied) or replicas == scale.followed):
        target = initial if scale.wanted is None else scale.wanted
        return Decision(replicas=target if target != replicas else None, followed=target, object=new)
    if new:
        return Decision(requested=replicas if replicas != scale.wanted else None, followed=replicas, object=new)
    if scale.wanted is not None and scale.wanted != scale.followed:
        return Decision(replicas=scale.wanted if scale.wanted != replicas else None, followed=scale.wanted)
    if scale.followed is None:
        return Decision(followed=replicas)
    if replicas != scale.followed:
        return Decision(requested=replicas, followed=replicas)
    return Decision()


def untouched(replicas: int, emptied: bool) -> bool:
    """Return whether nobody has scaled an object: since it was created, or since it was `emptied`."""
    return replicas == UNSET or (emptied and replicas == 0)


def whole_or_none(whole: int, replicas: int, emptied: bool) -> int | None:
    """Return the replicas to set of the trainer or the judge, or None to leave `replicas`, for a run that is not over.

    Their number belongs to the values: the trainer's ranks are distributed over `whole` replicas, so no number works but this one
    and 0, a pause. `emptied`: the scaler has removed the pods because a run had finished.
    """
    if replicas == whole or (replicas == 0 and not emptied):
        return None
    return whole
