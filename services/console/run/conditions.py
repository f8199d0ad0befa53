"""A run's condition on this machine, from its folder: `condition.json`, which `grpo run` keeps up to date.

Guarantees: it is read without Redis and without starting anything; a run whose console was killed is stopped, whatever the file
says.
"""

from __future__ import annotations

import contextlib
import time

import msgspec

from services.console.lock import holder
from services.console.paths import RunPaths
from services.operations.condition import Condition


class _Noted(msgspec.Struct):
    condition: Condition
    at: float
    """Unix seconds."""


def note(folder: RunPaths, condition: Condition) -> None:
    """Write the run's condition, atomically. On a full disk the previous one stays."""
    temporary = folder.condition.with_suffix(".new")
    with contextlib.suppress(OSError):  # whether the run still runs, its lock says
        temporary.write_bytes(msgspec.json.encode(_Noted(condition, time.time())) + b"\n")
        temporary.replace(folder.condition)


def of(folder: RunPaths) -> Condition:
    """Return the run's condition."""
    found, noted = holder(folder.path), _read(folder)
    if found is not None and not found.readers:
        return noted.condition if noted and noted.condition.word in ("running", "paused") else Condition("running")
    return left(folder) or Condition("stopped")


def left(folder: RunPaths) -> Condition | None:
    """Return how the last start of the run ended; None if it was never started."""
    if (noted := _read(folder)) is None:
        return None
    if noted.condition.word in ("running", "paused"):
        return Condition("stopped", "grpo run was killed")
    return noted.condition


def _read(folder: RunPaths) -> _Noted | None:
    try:
        return msgspec.json.decode(folder.condition.read_bytes(), type=_Noted)
    except (OSError, msgspec.MsgspecError):
        return None
