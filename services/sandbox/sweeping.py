"""Decides which pods are no longer needed, and how many to keep ready. Pure.

Guarantees: a rollout's pod is kept while the rollout's ticket is held under the claim for which the pod was opened, and no
longer; code has never run in an unassigned pod.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.sandbox.pods import HELD, ROLLOUT, STATE, TEMPLATE, WARM, SandboxPod

FRESH_SHARE = 0.5
"""Part of its longest life that a pod may have spent waiting: the rest is for a rollout."""


@dataclass(frozen=True)
class Sweep:
    """What to do."""

    orphaned: list[SandboxPod]
    """Pods that are no longer held."""
    spare: list[SandboxPod]
    """Ready pods to delete: too many, too old, ended, or created from another template."""
    ready: list[SandboxPod]
    """Pods that may be assigned to a rollout, oldest first."""
    create: int


def decide(pods: Sequence[SandboxPod], fences: Collection[str], template: str, warm: int, oldest: float) -> Sweep:
    """Decide, given all pods, the fences of all current claims, the template's digest and how many to keep ready.

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
    """Return whether the pod may be assigned to a rollout, now or when it is ready."""
    return pod.labels.get(STATE) == WARM and pod.alive and pod.labels.get(TEMPLATE) == template and pod.created >= oldest
