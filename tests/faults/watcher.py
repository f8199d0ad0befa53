"""The invariants of a run under test, checked at every poll, and the state of its pods.

Guarantees: it only reads, and judges the run by what it saw in one atomic read. It bypasses the proxies, polls some twenty times
per second and audits five times per second; while Redis is down it sees nothing. Waits for: Redis. Unblocked by: a poll every
`POLL_S`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from services.operations.inspection.ledger import assess
from services.protocol.errors import StoreError
from services.protocol.messages import PodStatus, Round
from services.store import RunState, Store
from tests.faults.run_under_test import RunUnderTest

POLL_S = 0.05
AUDIT_EVERY_S = 0.2
HEARD_S = 1.0  # a pod is alive if its last heartbeat is at most five periods old
ANSWER_S = 2.0  # a poll that takes longer is abandoned: Redis is down


@dataclass(frozen=True)
class Look:
    """The state of the run at one moment."""

    at: float
    state: RunState | None = None
    pods: dict[str, PodStatus] = field(default_factory=dict)
    round: Round | None = None

    @property
    def committed(self) -> int:
        """The last committed step; -1 if there is none."""
        return self.state.committed_step if self.state else -1

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return bool(self.state and self.state.finished)

    def phase(self, who: str) -> str:
        """Return the phase that a pod, or `round`, reports; empty if it sends no heartbeats."""
        if who == "round":
            return self.round.phase if self.round else ""
        return self.pods[who].phase if who in self.pods else ""

    def dataprep(self, phase: str) -> str:
        """Return the dataprep pod in `phase`, or an empty string."""
        return next((pod.name for pod in self.pods.values() if pod.kind == "dataprep" and pod.phase == phase), "")

    def missing(self, pods: list[str]) -> str:
        """Return why the run is not steady, apart from its progress; empty if it is."""
        for name in pods:
            phase = self.phase(name)
            if phase in ("", "starting", "loading", "unsynced", "draining", "restoring", "catching up"):
                return f"{name} is {phase or 'not heard of'}"
        return "" if self.dataprep("leading") else "no dataprep leads"


class Watcher:
    """Polls `run` until it is closed. `violations` lists what it observed, in order."""

    def __init__(self, run: RunUnderTest) -> None:
        self.run = run
        self.last = Look(0.0)
        self.violations: list[str] = []
        self.plans: dict[int, list[str]] = {}
        self.audits, self.looks, self.max_lag, self.max_slots = 0, 0, 0, 0
        self.went_back = 0  # how often the last committed step moved backwards, where that is allowed
        self.may_go_back = False
        self.restores: set[int] = set()
        """Steps to which a restore was requested."""
        self._checkpointed, self._attempt = -1, 0
        self._audited = 0.0
        self._store: Store | None = None
        self._looking = asyncio.Lock()
        self.tell: Callable[[str], None] = lambda _: None

    def violation(self, what: str) -> None:
        """Record a violation, unless it is already recorded."""
        if what not in self.violations:
            self.violations.append(what)
            self.tell(f"VIOLATION: {what}")

    async def follow(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(POLL_S)

    async def look(self) -> Look:
        """Poll now, and return the latest state, which is the previous one while Redis is down."""
        async with self._looking:  # one at a time, otherwise an older poll could be judged after a newer one
            try:
                async with asyncio.timeout(ANSWER_S):
                    if self._store is None:
                        self._store = await self.run.store()
                    await self._look(self._store)
            except (StoreError, RedisError, OSError, TimeoutError):
                await self.close()
        return self.last

    async def close(self) -> None:
        """Close the connection. The next poll opens another, to wherever Redis is then."""
        store, self._store = self._store, None
        if store is not None:
            await store.close()

    async def _look(self, store: Store) -> None:
        state = await store.run.state()
        members = await store.fleet.members(HEARD_S)
        current, _ = await store.fleet.round()
        if state is not None:
            self._judge(state, current)
            if state.restoring < 0 and time.monotonic() - self._audited > AUDIT_EVERY_S:
                self._audited = time.monotonic()
                await self._audit(store, state)
        self.last = Look(time.monotonic(), state, {status.name: status for status in members}, current)
        self.looks += 1

    def _judge(self, state: RunState, current: Round | None) -> None:
        restored = state.committed_step < self.last.committed and state.committed_step in self.restores
        if restored:  # later steps are planned again, with the same groups
            self.plans = {step: groups for step, groups in self.plans.items() if step <= state.committed_step}
        if state.committed_step < self.last.committed:
            self.went_back += 1
            if not (self.may_go_back or restored):
                self.violation(f"committed_step went back from {self.last.committed} to {state.committed_step}")
        attempt = current.attempt if current else 0
        if not self.may_go_back:
            if state.checkpointed_step < self._checkpointed and not restored:
                self.violation(f"checkpointed_step went back from {self._checkpointed} to {state.checkpointed_step}")
            if attempt < self._attempt:
                self.violation(f"the sync rounds went back from attempt {self._attempt} to {attempt}")
        self._checkpointed, self._attempt = state.checkpointed_step, attempt
        self.max_slots = max(self.max_slots, state.slots_used)
        if state.slots_used > state.slots:
            self.violation(f"{state.slots_used} slots are in use, of {state.slots}")

    async def _audit(self, store: Store, state: RunState) -> None:
        self.audits += 1
        for message in assess(self.run.name, await store.run.audit()).messages:
            self.violation(f"audit: {message}")
        for step in range(max(0, state.committed_step - 2), state.prepared_step + 1):
            if step in self.plans or (plan := await store.steps.plan(step)) is None:
                continue
            # If the plan is retired meanwhile, only some of its records remain.
            records = await store.inspection.group_records(plan.groups)
            lag = max((step - min(record.header.oldest) for record in records.values() if record.header), default=0)
            self.max_lag = max(self.max_lag, lag)
            if lag > self.run.config.admission.max_staleness:
                self.violation(f"step {step} was planned with a lag of {lag} steps")
            self.plans[step] = list(plan.groups)
