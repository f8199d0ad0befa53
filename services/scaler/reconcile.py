"""Decides the numbers of pods of generators, trainer and judge, and which of two numbers follows the other. Pure.

Guarantees: the last change wins. `grpo scale` and the endpoints change the request, `kubectl scale` changes the replicas. If
both changed, the request wins. A number that was once followed is never set back, neither by an upgrade nor by a rollback: no
manifest names it. A finished run is scaled to zero once; a pod that an operator starts afterwards stays.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.store.records import Scale

UNSET = 1
"""The replicas that a cluster gives an object whose manifest names none."""

EMPTYING, FINISHED = "emptying", "finished"
"""`Scale.object` of a run whose pods the scaler removes, or has removed, because it was over."""


@dataclass(frozen=True)
class Decision:
    """What to set; None means leave unchanged."""

    replicas: int | None = None
    requested: int | None = None
    followed: int | None = None
    object: str | None = None


def decide(scale: Scale, replicas: int, object: str = "", initial: int = UNSET) -> Decision:
    """Compare both numbers with `scale.followed`, on which they last agreed for the Deployment `object`.

    A Deployment that was not followed yet is new, or was emptied at the end of the run. It gets the requested number or,
    without a request, `initial`; unless another number was set in the meantime, which then applies. A request from before the
    first comparison wins in any case: the scaler itself sets `initial` before the run exists.
    """
    new = object if object != (scale.object or "") else None
    early = scale.wanted is not None and scale.followed is None
    if new and (early or replicas in (UNSET, scale.followed)):
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


def whole_or_none(whole: int, replicas: int, emptied: bool) -> int | None:
    """Return the replicas to set of the trainer or the judge, or None to leave `replicas`, for a run that is not over.

    Their number belongs to the values: the trainer's ranks are distributed over `whole` replicas, so no number works but this one
    and 0, a pause. `emptied`: the scaler has removed the pods when the run finished, and the run has been resumed since.
    """
    if replicas == whole or (replicas == 0 and not emptied):
        return None
    return whole
