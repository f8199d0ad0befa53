"""Holds claimed tickets: works on each in its own task, renews its lease, submits it or reports why not.

Guarantees: a claimed ticket is submitted, handed back or failed with a reason, or its lease expires and another pod claims it.
Every token of an evaluation's result was sampled by its version; otherwise the ticket fails. No failure of a ticket ends the
pod's main loop, except the end of the engine, which ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import structlog
from prometheus_client import Counter, Histogram

from services.groups.generated import GenerationFailed, TicketFailed
from services.groups.records import mixed
from services.protocol.errors import RedisFull, StoreError
from services.protocol.messages import Header, Ticket
from services.runtime.loops import Broken, Loop, end_tasks
from services.runtime.service import Service
from services.store import Claim

log = structlog.get_logger()

ROOM = "room"
"""Notification topic of this process: a ticket has ended, so another may be claimed."""
LEASE_SHARE = 3  # renewals per lease
SUBMIT_AGAIN_S = 1.0
MAX_ATTEMPTS = 4
"""Failed attempts after which a ticket goes to the dead letters, or a rollout in an environment is left out of its group."""
MAX_EXPIRIES = 16
"""Leases of one ticket that may expire, because the pod that held it died, before it is abandoned: a ticket that kills its
generator costs at most this many restarts, and pods that are evicted one after the other do not use them up."""
PAYLOAD_TTL_S = 3600
"""Seconds after which a payload expires if its header was never committed, and a ticket's tokens so far if no pod continues it.
A header follows its payload in the same request, or within seconds; an hour outlasts a Redis that fails over in between.
"""
FAILURES = ("verifier", "generation", "store", "other")
"""Causes of a failed ticket, as metrics name them."""


@dataclass
class HeldTicket:
    """A ticket being worked on."""

    claim: Claim
    ticket: Ticket
    started: float = field(default_factory=time.monotonic)
    submitting: bool = False  # from then on only Redis decides who owns the ticket
    task: asyncio.Task[None] | None = None


class HolderMetrics(Protocol):
    """The metrics of a holder."""

    claimed: Counter
    refused: Counter
    lost: Counter
    failures: Mapping[str, Counter]  # by cause, of `FAILURES`
    given_up: Counter
    submit_s: Histogram


Held = TypeVar("Held", bound=HeldTicket)


class TicketWorker(Protocol[Held]):
    """Makes groups of tickets: a generator's engine, or an environment's programs."""

    def hold(self, claim: Claim, ticket: Ticket) -> Held:
        """Return the record of a ticket that was just claimed."""
        ...

    def unfit(self, ticket: Ticket) -> str:
        """Return why a ticket cannot be worked on, or ""."""
        ...

    async def complete(self, held: Held) -> tuple[Header, bytes] | None:
        """Return the header and the encoded payload of a ticket's group, which is empty for an evaluation; None if its lease was
        lost.
        """
        ...

    async def keep_tokens(self, held: Held) -> None:
        """Keep the tokens of a failed ticket that are worth it, so that they need not be sampled again."""
        ...


class TicketHolder(Generic[Held]):
    """Takes tickets of training and of evaluation from claim to submission."""

    def __init__(self, service: Service, metrics: HolderMetrics, worker: TicketWorker[Held], rollouts: bool = False) -> None:
        """`rollouts`: claim the tickets whose rollouts run in environments."""
        self.held: dict[str, Held] = {}  # by entry of the claim
        self._service, self._metrics, self._worker, self._rollouts = service, metrics, worker, rollouts
        self._tickets, self._name = service.store.tickets, service.status.name
        self._lease_s = service.config.fleet.lease_s
        self._scan = dict.fromkeys((False, True), "0-0")  # position in the stream of training and in that of evaluation
        self._adopts = {False, True}  # the first claims adopt the tickets of an earlier process of this pod
        self._fault: Broken | None = None
        self._ready_at: float | None = None  # when the pod first claimed
        self._submitted = False

    def of(self, evaluates: bool) -> list[Held]:
        """Return the tickets of evaluation, or those of training."""
        return [held for held in self.held.values() if (held.ticket.version is not None) == evaluates]

    async def claim(self, weights: tuple[int, int], room: int, evaluates: bool = False) -> int:
        """Claim up to `room` tickets of training or of the open evaluation round, and begin to work on them; return how many.

        `weights`: trainer fence and version that sample them.
        """
        fence, version = weights
        asked = time.monotonic()
        self._ready_at = self._ready_at or asked
        self._scan[evaluates], claims = await self._tickets.claim(
            self._name,
            version,
            fence,
            self._lease_s,
            room,
            self._scan[evaluates],
            evaluates in self._adopts,
            MAX_EXPIRIES,
            rollouts=self._rollouts,
            evaluates=evaluates,
        )
        if claims:  # a claim that is refused adopts nothing
            self._adopts.discard(evaluates)
        if not evaluates:
            self._metrics.claimed.inc(len(claims))
        for claim in claims:
            if claim.ticket is not None:
                self._service.tracing.record("claim", claim.ticket.trace, asked, generator=self._name, fence=claim.fence)
            await self.start(claim)
        return len(claims)

    def check_engine(self) -> None:
        """Raise `Broken` if the engine has died; leases then expire and other pods take over."""
        if self._fault is not None:
            raise self._fault

    def engine_died(self, error: Broken) -> None:
        """End the pod's main loop, which ends the process."""
        self._fault = error
        self._service.notifications.notify(ROOM)

    async def start(self, claim: Claim) -> None:
        """Begin to work on a ticket. One that cannot be worked on fails for good."""
        fault = "the ticket is corrupt" if claim.ticket is None else self._worker.unfit(claim.ticket)
        if fault or claim.ticket is None:
            try:
                await self._tickets.fail(self._name, claim, fault, 1)
            except StoreError as error:  # its lease expires, and it is claimed again; others that were claimed with it may follow
                log.warning("failure not reported", reason=fault, error=str(error))
            return
        if former := self.held.pop(claim.entry, None):  # our own lease expired and we claimed the ticket again
            await self.cancel(former)
        held = self._worker.hold(claim, claim.ticket)
        self.held[claim.entry] = held
        held.task = asyncio.create_task(self._complete(held), name=claim.ticket_id)

    async def _complete(self, held: Held) -> None:
        """Take one ticket from claim to submission; turn any error into a failure with a reason."""
        structlog.contextvars.bind_contextvars(ticket=held.ticket.id)
        try:
            group = await self._worker.complete(held)
            if group is None or not await self._submit(held, *group):
                self._metrics.refused.inc()
        except TicketFailed as failure:
            await self._fail(held, failure.cause, str(failure), 1 if failure.final else MAX_ATTEMPTS)
        except Broken as error:
            self.engine_died(error)
        except StoreError as error:  # not the ticket's fault: its lease expires, and it is claimed again
            self._metrics.failures["store"].inc()
            log.warning("ticket abandoned: Redis unavailable", error=str(error))
        except Exception as error:  # a ticket must not end the loop; it is retried, then moved to the dead letters
            log.warning("ticket failed", exc_info=True)
            await self._fail(held, "other", f"{type(error).__name__}: {error}", MAX_ATTEMPTS)
        finally:
            self._forget(held)
            self._service.notifications.notify(ROOM)

    async def _fail(self, held: Held, cause: str, reason: str, max_attempts: int) -> None:
        self._metrics.failures[cause].inc()
        try:
            with contextlib.suppress(RedisFull):  # a full Redis still accepts the report
                await self._worker.keep_tokens(held)
            given_up = await self._tickets.fail(self._name, held.claim, reason, max_attempts)
        except StoreError as error:  # its lease expires, and it is claimed again
            log.warning("failure not reported", reason=reason, error=str(error))
            return
        if given_up:
            self._metrics.given_up.inc()
            log.error("ticket given up", reason=reason)

    async def _submit(self, held: Held, header: Header, payload: bytes) -> bool:
        """Submit until Redis answers; the group is kept as long as no other pod has the ticket."""
        if held.ticket.version is not None and (fault := mixed(header, held.ticket.version)):
            raise GenerationFailed(fault)
        held.submitting = True
        started = time.monotonic()
        while True:
            try:
                accepted = await self._tickets.submit(self._name, held.claim, header, payload, PAYLOAD_TTL_S)
                self._metrics.submit_s.observe(time.monotonic() - started)
                self._service.tracing.record("submit", held.ticket.trace, started, accepted=accepted)
                if accepted and not self._submitted:
                    self._submitted = True
                    log.info("first group submitted", since_ready_s=round(time.monotonic() - (self._ready_at or started), 3))
                return accepted
            except StoreError as error:  # Redis is unavailable or full
                log.warning("submission failed, retrying", error=str(error))
                await asyncio.sleep(SUBMIT_AGAIN_S)

    async def renew(self, loop: Loop) -> None:
        """Renew the leases of everything in progress; drop tickets that were lost to another pod."""
        while True:
            if all_held := list(self.held.values()):
                lost = await self._tickets.renew(self._name, [held.claim for held in all_held])
                for held in all_held:
                    still = self.held.get(held.claim.entry) is held
                    if held.claim.entry in lost and not held.submitting and still:
                        self._metrics.lost.inc()
                        log.warning("lease lost", ticket=held.ticket.id)
                        await self.cancel(held)
            loop.progress()
            await asyncio.sleep(self._lease_s / LEASE_SHARE)

    async def release(self, held: Held, tokens: int = 0) -> bool:
        """Hand back a ticket that was cancelled; return whether it was still held. `tokens`: how many were saved of it."""
        return await self._tickets.release(self._name, held.claim, tokens)

    async def cancel(self, held: Held) -> None:
        """Stop working on a ticket."""
        if held.task is not None:
            await end_tasks([held.task])
        self._forget(held)

    async def close(self) -> None:
        """Stop working on all tickets, without handing them back: their leases expire."""
        await end_tasks(held.task for held in self.held.values() if held.task is not None)

    def _forget(self, held: Held) -> None:
        if self.held.get(held.claim.entry) is held:
            del self.held[held.claim.entry]
