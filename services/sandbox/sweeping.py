"""Decides which pods nobody needs, and how many to keep ready. Pure.

Guarantees: a pod that a rollout has is kept while somebody holds the rollout's ticket, by the claim that it was opened under, and
no longer; a pod that nobody has is never one in which code has run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.sandbox.pods import HELD, ROLLOUT, STATE, TEMPLATE, WARM, SandboxPod

FRESH_SHARE = 0.5
"""Part of its longest life that a pod may have spent waiting: the rest is for a rollout."""


@dataclass(frozen=True)
class Sweep:
    """What is to be done."""

    orphaned: list[SandboxPod]
    """Held by nobody any longer."""
    spare: list[SandboxPod]
    """Kept ready, and not to be: too many, too old, ended, or made from another template."""
    ready: list[SandboxPod]
    """That a rollout may be given, oldest first."""
    create: int


def decide(pods: Sequence[SandboxPod], fences: Collection[str], template: str, warm: int, oldest: float) -> Sweep:
    """Decide, given all pods, the fences of the claims there are, the template's digest and how many to keep ready.

    `oldest`: the earliest creation of a pod that still has enough of its life before it. The claims were read after the pods.
    """
    orphaned, spare, kept = list[SandboxPod](), list[SandboxPod](), list[SandboxPod]()
    for pod in sorted(pods, key=lambda each: (not each.ready, each.created, each.name)):
        if pod.deleting:
            continue
        if pod.labels.get(STATE) == HELD:
            if pod.labels.get(ROLLOUT, "").partition(".")[0] not in fences:
                orphaned.append(pod)
        elif len(kept) < warm and _fit(pod, template, oldest):
            kept.append(pod)
        else:
            spare.append(pod)
    return Sweep(orphaned, spare, [pod for pod in kept if pod.ready], max(0, warm - len(kept)))


def _fit(pod: SandboxPod, template: str, oldest: float) -> bool:
    """Return whether a rollout may be given the pod, now or when it is ready."""
    return pod.labels.get(STATE) == WARM and pod.alive and pod.labels.get(TEMPLATE) == template and pod.created >= oldest
