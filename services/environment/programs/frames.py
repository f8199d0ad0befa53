"""Messages between pod and worker: msgpack frames over a socket pair (services/verifiers/sandbox/frames.py)."""

from __future__ import annotations

from typing import Any

import msgspec


class ProgramSetup(msgspec.Struct, array_like=True):
    """First frame to a worker."""

    kind: str  # python | agent
    function: str
    options: dict[str, Any]
    command: list[str] = []  # of an agent that is a program of its own


class Started(msgspec.Struct, array_like=True):
    """First frame of a worker: it is ready, or the reason why it cannot be."""

    error: str = ""
    restorable: bool = False  # whether its rollouts can be continued by another process


class ProgramStep(msgspec.Struct, array_like=True):
    """Something that a rollout's program is to do."""

    id: int
    rollout: str
    do: str  # start | turn | unknown | score | restore | close | run
    given: Any = None


class StepDone(msgspec.Struct, array_like=True):
    """What came of it."""

    id: int
    value: Any = None
    error: str = ""
    seconds: float = 0.0  # that its code took
