"""How the trainer's side of a weight-sync round ends."""

from __future__ import annotations

from dataclasses import dataclass

from services.protocol.messages import Round
from services.weights.membership import CollectiveGroup


class Stopped(Exception):
    """The process was asked to stop."""


class Alone(Exception):
    """No generator is available to take the weights, and none is expected."""


@dataclass(frozen=True)
class SyncReport:
    """Outcome of a round. Seconds run to the last acknowledgement, for the round and for its last attempt."""

    version: int
    epoch: int
    members: tuple[str, ...]
    attempts: int
    total_s: float
    transfer_s: float


@dataclass(frozen=True)
class Sent:
    """A round whose weights have been sent, but not all applied."""

    transfer: Round
    group: CollectiveGroup
    began: float  # with sending
    attempt_began: float
    first: tuple[float, int]  # when the first attempt for this version began, and the number of attempts before it
