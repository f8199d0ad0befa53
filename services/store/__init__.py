"""The typed store: one method per Redis Function, and the only user of Redis clients.

Guarantees: every hand-over is one atomic call, which takes effect as a whole or not at all; every call may be repeated, at once
or late, without a second effect (except `monitor.record`: readers take the first of its entries for a step), so the client
itself retries through a restart of the server. A repeated call may report that there was nothing to do; its caller then reads
the state again. A method that fails raises a `StoreError`. tests/repeats checks this for every function. A store consists of
facets, one for each part of a run's state, which share one connection: `store.tickets.claim()`, `store.steps.commit()`. The
Redis users of a run may call the functions of the facets they work with (acl.py). A facet is imported on first use, since a
command uses one or two, and importing all would take as long as the rest of the command.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from services.protocol.keys import Keys
from services.store.calls.payloads import Payloads
from services.store.connection.base import Connection
from services.store.connection.client import Login
from services.store.records import BufferedGroup, Claim, HeaderEntry, RunState, Settlement

if TYPE_CHECKING:
    import redis.asyncio as aioredis

    from services.store.calls.deadletters import DeadLetterStream
    from services.store.calls.evaluation import EvaluationCalls
    from services.store.calls.fleet import FleetCalls
    from services.store.calls.inspection import Inspection
    from services.store.calls.monitor import Monitor
    from services.store.calls.replay import ReplayTable
    from services.store.calls.restore import Restores
    from services.store.calls.run import Runs
    from services.store.calls.samples import SampleCalls
    from services.store.calls.snapshot import SnapshotWriter
    from services.store.calls.steps import Steps
    from services.store.calls.tickets import Tickets

__all__ = ["BufferedGroup", "Claim", "HeaderEntry", "RunState", "Settlement", "Store"]


class LazyFacet:
    """A facet of a store, `module.Class` of services/store/calls."""

    def __init__(self, path: str) -> None:
        self._module, _, self._class = path.rpartition(".")

    def __set_name__(self, store: type[Store], name: str) -> None:
        self._name = name

    def __get__(self, store: Store, kind: type[Store]) -> Any:
        """Create the facet and store it in place of this descriptor."""
        found = getattr(import_module(f"services.store.calls.{self._module}"), self._class)(store.connection, store.payloads)
        store.__dict__[self._name] = found
        return found


def _facet(path: str) -> Any:
    return LazyFacet(path)


class Store:
    """A run's state in Redis. Create it with `connect`; close it with `close`."""

    run: Runs = _facet("run.Runs")
    tickets: Tickets = _facet("tickets.Tickets")
    replay: ReplayTable = _facet("replay.ReplayTable")
    steps: Steps = _facet("steps.Steps")
    snapshots: SnapshotWriter = _facet("snapshot.SnapshotWriter")
    restores: Restores = _facet("restore.Restores")
    fleet: FleetCalls = _facet("fleet.FleetCalls")
    evaluation: EvaluationCalls = _facet("evaluation.EvaluationCalls")
    samples: SampleCalls = _facet("samples.SampleCalls")
    dead_letters: DeadLetterStream = _facet("deadletters.DeadLetterStream")
    monitor: Monitor = _facet("monitor.Monitor")
    inspection: Inspection = _facet("inspection.Inspection")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.payloads = Payloads(connection)

    @classmethod
    async def connect(cls, url: str, run: str, login: Login | str | None = None) -> Self:
        """Connect, check the server and load the functions. Raises `StoreError` within seconds on failure.

        `login` may be a plain password.
        """
        return cls(await Connection.connect(url, run, login))

    @property
    def client(self) -> aioredis.Redis:
        """Return redis-py's client, for plain commands."""
        return self.connection.client

    @property
    def keys(self) -> Keys:
        """Return the names of the run's keys."""
        return self.connection.keys

    async def close(self) -> None:
        """Close the connections."""
        await self.payloads.close()
        await self.connection.close()
