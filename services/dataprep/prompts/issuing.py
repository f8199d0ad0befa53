"""Turns the order of prompts into tickets, and reissues the tickets that a restore cut off.

Guarantees: tickets are issued in the order that `PromptOrder` gives, each once. Redis alone holds the position in the order: if
its cursor is not where the last call left it, the order is read again. A lost reply, a leader that died or a server that lost
its last second of writes therefore neither skips a prompt nor repeats one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import structlog

from services.config import RunConfig
from services.dataprep.prompts.catalogue import Prompt, PromptSource
from services.dataprep.prompts.curriculum import load_curriculum
from services.dataprep.prompts.order import Draft, Exhausted, Pick, PromptOrder
from services.groups.replay_weights import drawn
from services.protocol.messages import Ticket
from services.runtime.portal import in_daemon_thread
from services.runtime.tracing import TraceRecorder
from services.store import Store
from services.store.records import PassRate, SweptTable

log = structlog.get_logger()

ISSUE_BATCH = 128  # tickets per call


def ticket_seed(run_seed: int, epoch: int, row: int) -> int:
    """Return the seed of a ticket, 48 bits. The same prompt gets different samples in every epoch and run, repeatably."""
    return drawn(48, run_seed, epoch, row)


class Issuer:
    """Issues the leader's tickets: first those requeued from the dead letters, then the next prompts."""

    def __init__(self, store: Store, source: PromptSource, config: RunConfig, tracing: TraceRecorder) -> None:
        self.store, self.source, self.config, self.tracing = store, source, config, tracing
        self.order = PromptOrder(
            source.spans,
            config.run.seed,
            config.data.shuffle,
            config.slots,
            config.filters.exclude_pass_rate,
            load_curriculum(config.data.curriculum_function),
        )
        self._environments = config.sources_with_environment
        self._needs_rates = bool(config.filters.exclude_pass_rate or config.data.curriculum_function)
        self._drafting = threading.Lock()
        self._began: float | None = None  # when the draft of an epoch's first prompts began
        self._cursor = 0  # position of `order`
        self.exhausted = ""

    def forget(self) -> None:
        """Discard the position in the order, so that the next call reads it again: another process may have led meanwhile."""
        self._cursor, self.exhausted = -1, ""

    async def restore(self, cursor: int) -> None:
        """Resume the order from Redis, at prompt number `cursor` of the run."""
        self.order.restore(*await self.store.tickets.order())
        self._cursor, self.exhausted = cursor, ""

    async def issue(self, fence: int, cursor: int, wanted: int, swept: SweptTable) -> int:
        """Issue up to `wanted` tickets and return how many were issued. Once no prompt is left, `exhausted` says why."""
        if cursor != self._cursor:  # a call took effect but its reply was lost, or the server lost its last write
            await self.restore(cursor)
        count = min(wanted, ISSUE_BATCH)
        names = await self.store.tickets.requeued(min(swept.requeued, count)) if swept.requeued and count > 0 else []
        again, rest = [_pick(name, self.source) for name in names], 0 if self.exhausted else count - len(names)
        rates: dict[int, PassRate] = {}
        begins = rest > 0 and self.order.begins_epoch(rest)
        if begins and self._needs_rates:
            if 0 <= swept.oldest_outstanding < cursor + count - self.config.slots:
                rest, begins = 0, False  # the rows of the epoch depend on the reward of this unfinished ticket
            else:
                rates = await self.store.replay.rates()
        try:
            draft = await self._draft(begins, max(rest, 0), cursor, rates, again)
        except Exhausted as reason:
            log.warning("prompts exhausted", reason=str(reason))
            self.exhausted, draft = str(reason), self.order.draft(0, cursor, rates, again)
        tickets = [self.ticket(pick, cursor + place) for place, pick in enumerate(draft.picks)]
        if not tickets:
            return 0
        issued = 0
        try:
            issued = await self.store.tickets.issue(
                fence, cursor, tickets, draft.state, draft.epochs, len(again), self._environments
            )
        finally:
            self.tracing.issued([ticket.trace for ticket in tickets], done=issued > 0)
        if issued:
            self.order.accept(draft)
            self._cursor = cursor + issued
        return issued

    async def _draft(self, begins: bool, count: int, cursor: int, rates: Mapping[int, PassRate], again: Sequence[Pick]) -> Draft:
        """Draft the next prompts: those of a new epoch beside the event loop, since a curriculum may take long, one at a time."""

        def draft() -> Draft:
            with self._drafting:  # a call that was cancelled may still be at it
                return self.order.draft(count, cursor, rates, again)

        if not begins:
            return self.order.draft(count, cursor, rates, again)
        self._began = time.monotonic()
        try:
            return await in_daemon_thread(draft)
        finally:
            self._began = None

    @property
    def drafting_s(self) -> float:
        """Seconds for which the first prompts of an epoch have been drafted; 0: they are not."""
        return time.monotonic() - self._began if self._began is not None else 0.0

    async def issue_again(self, fence: int) -> int:
        """Reissue the next tickets that a restore cut off, and return how many."""
        found = await self.store.tickets.reissue(ISSUE_BATCH)
        tickets = [self.ticket(_pick(name, self.source), seq) for name, seq in found]
        issued = 0
        try:
            issued = await self.store.tickets.issue_again(fence, tickets, self._environments)
        finally:
            self.tracing.issued([ticket.trace for ticket in tickets], done=issued > 0)
        return issued

    def ticket(self, pick: Pick, seq: int) -> Ticket:
        """Make the ticket of a prompt, as number `seq` of the run. Its trace, if it gets one, begins here.

        That of a row that does not exist, which only a foreign dead letter can name, is empty and fails where it is claimed.
        """
        prompt = self.source.prompt(pick.row) if pick.row < len(self.source) else Prompt([], "", "")
        return Ticket(
            id=f"{pick.epoch}-{pick.row}",
            seq=seq,
            epoch=pick.epoch,
            index=pick.row,
            seed=ticket_seed(self.config.run.seed, pick.epoch, pick.row),
            prompt=prompt.tokens,
            answer=prompt.answer,
            group_size=self.config.sampling.group_size,
            source=pick.source,
            trace=self.tracing.begin(),
            row=prompt.row,
        )


def _pick(ticket: str, source: PromptSource) -> Pick:
    epoch, row = map(int, ticket.split("-"))
    return Pick(source.name_of(row), epoch, row)
