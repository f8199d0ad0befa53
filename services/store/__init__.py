"""The typed store: one method per Redis Function, and the only user of Redis clients.

Guarantees: every hand-over is one atomic call; every call may be repeated after a lost reply without a second effect (but for
`record`, of whose entries for a step readers take the first), so the client retries by itself through a restart of the server.
A repeated call may answer that there was nothing to do: its caller reads the state anew. What a method cannot do it says with
a `StoreError`.
A file per part of a group's life: tickets → replay → steps; beside them the run, its snapshots, the fleet, dead letters and what
people look at.
"""

from __future__ import annotations

from services.store.calls.console import ConsoleCalls
from services.store.calls.deadletters import DeadLetterCalls
from services.store.calls.evaluation import EvaluationCalls
from services.store.calls.fleet import FleetCalls
from services.store.calls.inspection import InspectionCalls
from services.store.calls.replay import ReplayCalls
from services.store.calls.restore import RestoreCalls
from services.store.calls.run import RunCalls
from services.store.calls.snapshot import SnapshotCalls
from services.store.calls.steps import StepCalls
from services.store.calls.tickets import TicketCalls
from services.store.records import BufferedGroup, Claim, HeaderEntry, RunState, Settlement

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
