"""Describes a run's condition in the words shared by status, screen, log and web console. Pure.

Guarantees: a run is in one of five conditions. A run without a running `grpo run` is never called running or paused, and one that
trains is never said to wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.protocol.messages import PodStatus
from services.store import RunState
from services.store.records import ROLES

Word = Literal["running", "paused", "stopped", "finished", "failed"]
LOADING = ("starting", "loading")
"""Phases in which a pod does no work yet."""
BEHIND = {
    "restoring": "the trainer to load the checkpoint",
    "catching up": "the trainer to retrain the steps after its checkpoint",
}


@dataclass(frozen=True)
class Condition:
    """A run's condition. `detail`: further description; may be empty."""

    word: Word
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.word}: {self.detail}" if self.detail else self.word


def condition(state: RunState | None, *, live: bool, left: Condition | None = None) -> Condition:
    """Return the condition of a run. `live`: its services run. `left`: how `grpo run` left it, if that is known."""
    if state is not None and state.finished:
        return Condition("finished", state.finished)
    if not live:
        if left is not None and left.word == "failed":
            return left
        restored = "" if state is None or state.restore < 0 else f"it resumes from {_restored(state)}"
        told = [left.detail if left else "", restored, f"it starts paused: {paused}" if (paused := _paused(state)) else ""]
        return Condition("stopped", "; ".join(part for part in told if part))
    if state is None:
        return Condition("running", "dataprep is reading the prompts and will then create the run")
    if max(state.restore, state.restoring) >= 0:
        return Condition("running", f"restoring {_restored(state)}")
    if state.stopping:
        return Condition("running", f"ending after this step: {state.stopping}")
    remedy = "; after fixing the cause: grpo replay requeue --all, then grpo resume" if state.failing else ""
    return Condition("paused", paused + remedy) if (paused := _paused(state)) else Condition("running")


def _restored(state: RunState) -> str:
    """Return the checkpoint to which the run is being restored, and by whom and why, as far as known."""
    asked = state.restore >= 0 and bool(state.restore_why)
    return f"the checkpoint of step {max(state.restore, state.restoring)}{f', requested by {state.restore_why}' * asked}"


def _paused(state: RunState | None) -> str:
    """Return which roles are paused, by whom, why and since when; empty: none."""
    if state is None:
        return ""
    requests: dict[str, list[str]] = {}
    for role, why in sorted(state.paused.items()):
        since = state.paused_since.get(role)
        requests.setdefault(f"{why}, since {moment(since)}" if since else why, []).append(role)
    return "; ".join(f"{_all_of(roles)} by {told}" for told, roles in requests.items())


def last_resume(state: RunState) -> str:
    """Return who resumed paused roles last, why and when; empty: nobody, or they are paused again."""
    if not state.last_resume or state.paused:
        return ""
    return f"resumed by {state.last_resume}, {moment(state.last_resume_at)}"


def _all_of(roles: list[str]) -> str:
    return "all services" if set(roles) == set(ROLES) else ", ".join(roles)


def moment(at: float) -> str:
    """Return a time in local time, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


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
