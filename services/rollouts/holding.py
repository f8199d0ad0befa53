"""Holds claimed tickets: works on each in its own task, renews its lease, submits it or reports why not.

Guarantees: a claimed ticket is submitted, handed back or failed with a reason, or its lease expires and another pod claims it.
No failure of a ticket ends its holder's loop, except the end of the engine, which ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import structlog
from prometheus_client import Counter, Histogram

from services.protocol.errors import RedisFull, StoreError
from services.protocol.messages import Ticket
from services.rollouts.generated import GenerationFailed, RolloutFailed
from services.runtime.loops import Broken, Loop, end_tasks
from services.runtime.service import Service
from services.store import Claim
from services.verifiers.base import VerifierFailure
from services.weights.receiver import EngineDead

log = structlog.get_logger()

LEASE_SHARE = 3  # renewals per lease
SUBMIT_AGAIN_S = 1.0
MAX_EXPIRIES = 16
"""Leases of one ticket that may expire, because the pod that held it died, before it is abandoned: a ticket that kills its
generator costs at most this many restarts, and pods that are evicted one after the other do not use them up."""
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

    refused: Counter
    lost: Counter
    failures: Mapping[str, Counter]  # by cause, of `FAILURES`
    given_up: Counter
    submit_s: Histogram


Held = TypeVar("Held", bound=HeldTicket)


class TicketHolder(Generic[Held]):
    """Takes claimed tickets to their end. A subclass claims them, works on them and submits the results.

    Holders of evaluation tickets override `report` and `extend`, too.
    """

    room = "room"
    """Notification topic of this process: a ticket has ended, so another may be claimed."""

    def __init__(self, service: Service, metrics: HolderMetrics) -> None:
        self.service, self._counted = service, metrics
        self.store, self.notifications, self.config = service.store, service.notifications, service.config
        self.name = service.status.name
        self.rollouts: dict[str, Held] = {}  # by entry of the claim
        self._fault: BaseException | None = None

    def hold(self, claim: Claim, ticket: Ticket) -> Held:
        """Return the record of a ticket that was just claimed."""
        raise NotImplementedError

    def unfit(self, ticket: Ticket) -> str:
        """Return why a ticket cannot be worked on, or ""."""
        raise NotImplementedError

    async def submit(self, rollout: Held) -> bool:
        """Generate, score and submit a ticket; return False if its lease had been lost."""
        raise NotImplementedError

    async def report(self, claim: Claim, reason: str, max_attempts: int) -> bool:
        """Hand a ticket back after a failure; return True if it reached `max_attempts` and is moved to the dead letters."""
        return await self.store.tickets.fail(self.name, claim, reason, max_attempts)

    async def extend(self, claims: Sequence[Claim]) -> set[str]:
        """Renew leases and return the entries that are lost."""
        return await self.store.tickets.renew(self.name, claims)

    async def keep_tokens(self, rollout: Held) -> None:
        """Keep the tokens of a failed ticket that are worth it, so that they need not be sampled again."""

    def check_engine(self) -> None:
        """Raise `Broken` if the engine has died; leases then expire and other pods take over."""
        if self._fault is not None:
            raise Broken(str(self._fault))

    def engine_died(self, error: EngineDead) -> None:
        """End the holder's loop, which ends the process."""
        self._fault = error
        self.notifications.notify(self.room)

    async def start(self, claim: Claim) -> None:
        """Begin to work on a ticket. One that cannot be worked on fails for good."""
        fault = "the ticket is corrupt" if claim.ticket is None else self.unfit(claim.ticket)
        if fault or claim.ticket is None:
            try:
                await self.report(claim, fault, max_attempts=1)
            except StoreError as error:  # its lease expires, and it is claimed again; others that were claimed with it may follow
                log.warning("failure not reported", reason=fault, error=str(error))
            return
        if held := self.rollouts.pop(claim.entry, None):  # our own lease expired and we claimed the ticket again
            await self.cancel(held)
        rollout = self.hold(claim, claim.ticket)
        self.rollouts[claim.entry] = rollout
        rollout.task = asyncio.create_task(self._complete(rollout), name=claim.ticket_id)

    async def _complete(self, rollout: Held) -> None:
        """Take one ticket from claim to submission; turn any error into a failure with a reason."""
        structlog.contextvars.bind_contextvars(ticket=rollout.ticket.id)
        try:
            if not await self.submit(rollout):
                self._counted.refused.inc()
        except VerifierFailure as failure:
            self._counted.failures["verifier"].inc()
            await self._fail(rollout, str(failure), 1 if failure.final else self.config.generator.max_attempts)
        except GenerationFailed as failure:
            self._counted.failures["generation"].inc()
            await self._fail(rollout, str(failure), self.config.generator.max_attempts)
        except RolloutFailed as failure:
            self._counted.failures["generation"].inc()
            await self._fail(rollout, str(failure), 1)
        except EngineDead as error:
            self.engine_died(error)
        except StoreError as error:  # not the ticket's fault: its lease expires, and it is claimed again
            self._counted.failures["store"].inc()
            log.warning("rollout abandoned: Redis unavailable", error=str(error))
        except Exception as error:  # a ticket must not end the loop; it is retried, then moved to the dead letters
            self._counted.failures["other"].inc()
            log.warning("rollout failed", exc_info=True)
            await self._fail(rollout, f"{type(error).__name__}: {error}", self.config.generator.max_attempts)
        finally:
            if self.rollouts.get(rollout.claim.entry) is rollout:
                del self.rollouts[rollout.claim.entry]
            self.notifications.notify(self.room)

    async def _fail(self, rollout: Held, reason: str, max_attempts: int) -> None:
        try:
            with contextlib.suppress(RedisFull):  # a full Redis still accepts the report
                await self.keep_tokens(rollout)
            given_up = await self.report(rollout.claim, reason, max_attempts)
        except StoreError as error:  # its lease expires, and it is claimed again
            log.warning("failure not reported", reason=reason, error=str(error))
            return
        if given_up:
            self._counted.given_up.inc()
            log.error("ticket moved to dead letters", reason=reason)

    async def submit_with_retry(self, rollout: Held, submit: Callable[[], Awaitable[bool]]) -> bool:
        """Submit until Redis answers; the group is kept as long as no other pod has the ticket."""
        rollout.submitting = True
        started = time.monotonic()
        while True:
            try:
                accepted = await submit()
                self._counted.submit_s.observe(time.monotonic() - started)
                self.service.tracing.record("submit", rollout.ticket.trace, started, accepted=accepted)
                return accepted
            except StoreError as error:  # Redis is unavailable or full
                log.warning("submission failed, retrying", error=str(error))
                await asyncio.sleep(SUBMIT_AGAIN_S)

    async def renew(self, loop: Loop) -> None:
        """Renew the leases of everything in progress; drop tickets that were lost to another pod."""
        while True:
            held = list(self.rollouts.values())
            if held:
                lost = await self.extend([rollout.claim for rollout in held])
                for rollout in held:
                    still = self.rollouts.get(rollout.claim.entry) is rollout
                    if rollout.claim.entry in lost and not rollout.submitting and still:
                        self._counted.lost.inc()
                        log.warning("lease lost", ticket=rollout.ticket.id)
                        await self.cancel(rollout)
            loop.progress()
            await asyncio.sleep(self.config.generator.lease_s / LEASE_SHARE)

    async def cancel(self, rollout: Held) -> None:
        """Stop working on a ticket."""
        if rollout.task is not None:
            await end_tasks([rollout.task])
        if self.rollouts.get(rollout.claim.entry) is rollout:
            del self.rollouts[rollout.claim.entry]
