"""Describes a run's condition in the words shared by status, screen, log and web console. Pure.

Guarantees: a run is in one of five conditions. A run without a running `grpo run` is never called running or paused.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from services.store import RunState

Word = Literal["running", "paused", "stopped", "finished", "failed"]


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
        mode, since = state.pause_modes.get(role, "keep"), state.paused_since.get(role)
        told = f"{why}, since {moment(since)}" if since else why
        requests.setdefault(told, []).append(role if mode == "keep" else f"{role} ({mode})")
    return "; ".join(f"{_all_of(roles)} by {told}" for told, roles in requests.items())


def last_resume(state: RunState) -> str:
    """Return who resumed paused roles last, why and when; empty: nobody, or they are paused again."""
    if not state.last_resume or state.paused:
        return ""
    return f"resumed by {state.last_resume}, {moment(state.last_resume_at)}"


def _all_of(roles: list[str]) -> str:
    from services.store.records import ROLES  # the store takes long to import, and not every reader of a condition needs it

    return "all services" if set(roles) == set(ROLES) else ", ".join(roles)


def moment(at: float) -> str:
    """Return a time in local time, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
