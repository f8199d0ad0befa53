"""Errors of the store. Each message is a line that says what happened and what to do."""

from __future__ import annotations

from collections.abc import Mapping


class StoreError(Exception):
    """Redis cannot be used in its current state; the message says why and how to fix it."""


class RedisUnreachable(StoreError):
    """Redis does not answer, or does not serve the run yet; a retry may succeed."""


class RedisFull(StoreError):
    """Redis has no memory for more. It still accepts what frees memory, so a retry may succeed."""


class Fenced(StoreError):
    """A newer leader or trainer has taken over: this process must stop writing."""


class OutOfOrder(StoreError):
    """A step or version does not follow the last one; read the run's state again."""


class Busy(StoreError):
    """The run's state is being copied or loaded: try again in a moment."""


class Damaged(StoreError):
    """Payloads that cannot be trained on, by name, with the fault of each."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"payload {name}: {why}" for name, why in reasons.items()))
        self.reasons = dict(reasons)


class DifferentRun(StoreError):
    """Another run already has this name."""


class NotFound(LookupError):
    """The run has no such item; the message says why, in one line."""
