"""The typed store: one method per Redis Function, and the only user of Redis clients.

Guarantees: every hand-over is one atomic call; every call may be repeated after a lost reply without a second effect (but for
`record`, of whose entries for a step readers take the first), so the client retries by itself through a restart of the server.
A repeated call may answer that there was nothing to do: its caller reads the state anew. What a method cannot do it says with
a `StoreError`.
A file per part of a group's life: tickets → replay → steps; beside them the run, its snapshots, the fleet, dead letters and what
people look at.
"""

from __future__ import annotations

from services.protocol.records import BufferedGroup, Claim, HeaderEntry, RunState, Settlement
from services.protocol.store.console import ConsoleCalls
from services.protocol.store.deadletters import DeadLetterCalls
from services.protocol.store.evaluation import EvaluationCalls
from services.protocol.store.fleet import FleetCalls
from services.protocol.store.inspection import InspectionCalls
from services.protocol.store.replay import ReplayCalls
from services.protocol.store.restore import RestoreCalls
from services.protocol.store.run import RunCalls
from services.protocol.store.snapshot import SnapshotCalls
from services.protocol.store.steps import StepCalls
from services.protocol.store.tickets import TicketCalls

__all__ = ["BufferedGroup", "Claim", "HeaderEntry", "RunState", "Settlement", "Store"]


class Store(
    RunCalls,
    TicketCalls,
    ReplayCalls,
    StepCalls,
    SnapshotCalls,
    RestoreCalls,
    FleetCalls,
    EvaluationCalls,
    DeadLetterCalls,
    ConsoleCalls,
    InspectionCalls,
):
    """A run's state in Redis. Make one with `connect`; close it with `close`."""
