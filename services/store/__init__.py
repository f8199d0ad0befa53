"""The typed store: one method per Redis Function, and the only user of Redis clients.

Guarantees: every hand-over is one atomic call, which takes effect as a whole or not at all; every call may be repeated, at once
or late, without a second effect (except `monitor.record`: readers take the first of its entries for a step), so the client
itself retries through a restart of the server. A repeated call may report that there was nothing to do; its caller then reads
the state again. A method that fails raises a `StoreError`. tests/repeats checks this for every function. A store consists of
facets, one for each part of a run's state, which share one connection: `store.tickets.claim()`, `store.steps.commit()`. The
Redis users of a run may call the functions of the facets they work with (acl.py).
"""

from __future__ import annotations

from typing import Self

import redis.asyncio as aioredis

from services.protocol.keys import Keys
from services.store.client import Login
from services.store.connection import Connection
from services.store.deadletters import DeadLetterStream
from services.store.evaluation import EvaluationCalls
from services.store.fleet import FleetCalls
from services.store.inspection import Inspection
from services.store.monitor import Monitor
from services.store.payloads import Payloads
from services.store.records import BufferedGroup, Claim, HeaderEntry, RunState, Settlement
from services.store.replay import ReplayTable
from services.store.restore import Restores
from services.store.run import Runs
from services.store.samples import SampleCalls
from services.store.snapshot import SnapshotWriter
from services.store.steps import Steps
from services.store.tickets import Tickets

__all__ = ["BufferedGroup", "Claim", "HeaderEntry", "RunState", "Settlement", "Store"]


class Store:
    """A run's state in Redis. Create it with `connect`; close it with `close`."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.payloads = Payloads(connection)
        shared = connection, self.payloads
        self.run = Runs(*shared)
        self.tickets = Tickets(*shared)
        self.replay = ReplayTable(*shared)
        self.steps = Steps(*shared)
        self.snapshots = SnapshotWriter(*shared)
        self.restores = Restores(*shared)
        self.fleet = FleetCalls(*shared)
        self.evaluation = EvaluationCalls(*shared)
        self.samples = SampleCalls(*shared)
        self.dead_letters = DeadLetterStream(*shared)
        self.monitor = Monitor(*shared)
        self.inspection = Inspection(*shared)

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
