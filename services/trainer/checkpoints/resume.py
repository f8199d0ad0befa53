"""How a trainer resumes a run: it attaches to what Redis knows, or restores the run from a checkpoint. Pure.

Guarantees: a run continues after a checkpoint whose weights it loads, on the batches that belong there: those that Redis still
has, or those derived from the checkpoint's own copy of dataprep's state (services/store/snapshot_format.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.config import RunConfig
from services.protocol import codec
from services.protocol.messages import StepPlan
from services.store.records import RunState


class NoWay(Exception):
    """The run cannot be resumed; the message says what is missing and what to do."""


@dataclass(frozen=True)
class Attach:
    """Redis has every plan after the checkpoint: steps committed since are retrained on the same batches."""

    why: str


@dataclass(frozen=True)
class Restore:
    """The run is restored to the checkpoint, in Redis too."""

    why: str


def wanted(state: RunState) -> int:
    """Return the step of the checkpoint that must be loaded; -1: the latest."""
    return state.restore if state.restore >= 0 else state.restoring


def fits(plan: StepPlan, config: RunConfig) -> bool:
    """Return whether the ranks of this configuration can train a plan."""
    return plan.ranks == config.data_parallel and plan.row_tokens <= config.trainer.row_tokens


def trainable(plan: bytes, config: RunConfig) -> bool:
    """Return whether the ranks of this configuration can train an encoded plan."""
    try:
        return fits(codec.decode(plan, StepPlan), config)
    except codec.CorruptMessage:
        return False


def choose(state: RunState, step: int, plans: Iterable[StepPlan], config: RunConfig) -> Attach | Restore:
    """Choose what to do with a checkpoint of `step` (-1: none) and the `plans` that Redis has after it. Raises `NoWay`."""
    if step < 0 and max(state.checkpointed_step, wanted(state)) >= 0:
        raise NoWay(
            f"the run has a checkpoint of step {max(state.checkpointed_step, wanted(state))}, but its folder is empty: "
            "mount the volume it was written to, or choose another run.name"
        )
    unfit = [plan for plan in plans if not fits(plan, config)]
    shape = f"{config.data_parallel} ranks with rows of {config.trainer.row_tokens} tokens"
    if state.restore >= 0:
        return Restore(f"step {step} was requested{f' by {state.restore_why}' * bool(state.restore_why)}")
    if state.restoring >= 0:
        return Restore(f"a restore to step {step} was interrupted")
    if step > state.committed_step:
        return Restore(f"Redis has committed steps only up to {state.committed_step}; later ones were lost")
    if step < state.retired_step:
        return Restore(f"Redis has no plans between this checkpoint and that of step {state.retired_step}, which is gone")
    if unfit:
        planned = f"steps were planned for {unfit[0].ranks} ranks with rows of {unfit[0].row_tokens} tokens, not {shape}"
        if step < 0:
            raise NoWay(f"{planned}, and there is no checkpoint: set it back")
        return Restore(planned)
    again = state.committed_step - step
    return Attach(
        f"Redis knows every step up to {state.committed_step}"
        + (f"; retraining {again} {'step' if again == 1 else 'steps'}" if again else "")
    )
