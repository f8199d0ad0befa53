"""Describes what a run waits for before it can train its next step. Pure.

Guarantees: empty once it has all it needs, so that a run that trains is never said to wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.protocol.messages import PodStatus
from services.store import RunState

LOADING = ("starting", "loading")
BEHIND = {
    "restoring": "the trainer to load the checkpoint",
    "catching up": "the trainer to retrain the steps after its checkpoint",
}


def awaited(state: RunState | None, pods: Sequence[PodStatus], wanted: int | None) -> str:
    """Return what a run that has neither ended nor is paused waits for; empty: nothing. `wanted`: desired generators, if
    known."""
    if state is not None and (state.ended or state.paused):
        return ""
    of = {kind: [pod for pod in pods if pod.kind == kind] for kind in ("dataprep", "trainer", "generator")}
    if not of["dataprep"]:
        return "dataprep to start" if state is not None else "dataprep to read the prompts"
    if state is None:
        return "dataprep to create the run"
    return _trainer(of["trainer"]) or _generators(of["generator"], wanted) or _first_step(state)


def _trainer(pods: Sequence[PodStatus]) -> str:
    if not pods:
        return "the trainer to start"
    if any(pod.phase in LOADING for pod in pods):
        return "the trainer to load the model"
    return next((words for phase, words in BEHIND.items() if any(pod.phase == phase for pod in pods)), "")


def _generators(pods: Sequence[PodStatus], wanted: int | None) -> str:
    if wanted == 0 and not pods:
        return "a generator: 0 are desired (grpo scale N)"
    if not pods:
        return "the generators to start"
    if all(pod.phase in LOADING for pod in pods):
        return "the generator to load the model" if len(pods) == 1 else f"{len(pods)} generators to load the model"
    if all(pod.phase in (*LOADING, "unsynced") for pod in pods):
        return "the first weights to reach a generator"
    return ""


def _first_step(state: RunState) -> str:
    if state.committed_step >= 0:
        return ""
    if state.prepared_step >= 0:
        return "the first step to be trained"
    return f"the first groups of completions ({state.slots_used} of {state.slots} slots in use)"
