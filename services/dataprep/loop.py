"""Dataprep's main loop: settle finished groups, prepare steps, issue tickets.

Guarantees: one leader at a time acts, by fencing number; every hand-over is one function, so a leader that dies leaves
nothing half done and its successor goes on from Redis alone; the order of prompts depends on the seed and nothing else.
Waits for: headers, free slots, a published version, leadership. Unblocked by: generators (`headers`, `tickets` lost or
buried), the trainer (`version`, `slots`), operators (`control`), the end of another leader's lease.
"""

from __future__ import annotations

import contextlib
import hashlib
import time

import numpy as np
import structlog

from services.dataprep import admission, advantages, stats
from services.dataprep.metrics import DataprepMetrics
from services.dataprep.order import PromptOrder
from services.dataprep.planning import Layout, PlanGroup, plan_step
from services.dataprep.prompts import PromptSource
from services.dataprep.settling import settle
from services.dataprep.table import Table
from services.protocol.errors import Fenced, OutOfOrder, StoreError
from services.protocol.messages import RankPlan, StepPlan, Ticket
from services.protocol.store import RunState
from services.runtime.loops import Loop
from services.runtime.service import Service

log = structlog.get_logger()

IDLE_S = 1.0  # a missed ring costs at most this much
LEASE_SHARE = 3  # renewals per lease of the leadership
SETTLE_BATCH = 256  # headers per call: some milliseconds of the server's time
ISSUE_BATCH = 128  # tickets per call


class DataprepLoop:
    """Leads a run, or stands by."""

    def __init__(self, service: Service, source: PromptSource, metrics: DataprepMetrics) -> None:
        self.service, self.source, self.metrics = service, source, metrics
        self.store, self.bell, self.config = service.store, service.bell, service.config
        self.order = PromptOrder(len(source), self.config.run.seed, self.config.data.shuffle)
        self.rules = admission.Rules(
            self.config.admission.prompts_per_step, self.config.admission.max_staleness,
            self.config.admission.overtake, self.config.admission.overtake_deadline_s, self.config.replay.sampler,
        )  # fmt: skip
        self.layout = Layout(
            self.config.trainer.ranks, self.config.trainer.row_tokens, self.config.trainer.mini_batches,
            self.config.loss.denominator_tokens if self.config.loss.denominator == "constant" else 0,
        )  # fmt: skip
        self.generated = stats.GeneratedStats()
        self._behind_since: float | None = None  # when a step could first be filled but for an older ticket

    def why_idle(self) -> str:
        """Why this pod does nothing now; a standby is ready, as it would take over."""
        state = self.service.view.state
        if state is None:
            return "the run does not exist yet"
        return f"paused: {state.paused[self.service.kind]}" if self.service.view.paused else ""

    async def work(self, loop: Loop) -> None:
        """Lead whenever nobody else does, until told to stop."""
        candidate, lease_s = self.service.status.member, self.config.fleet.ttl_s
        try:
            while not self.service.stopping.is_set():
                loop.progress()
                fence = await self.store.lead(candidate, lease_s)
                if fence is None:
                    self.service.say(phase="standby")
                    await self.bell.wait("control", timeout=lease_s / LEASE_SHARE)
                    continue
                await self._lead(loop, fence)
        finally:
            with contextlib.suppress(StoreError):  # a pod must be able to go without Redis: its lease runs out
                await self.store.step_down(candidate)

    async def _lead(self, loop: Loop, fence: int) -> None:
        """Act as the leader until told to stop or fenced off."""
        self.service.say(phase="leading")
        self.metrics.leads.set(1)
        log.info("leading", fence=fence)
        table = await self._read_table()
        self._behind_since = None
        renewed = time.monotonic()
        try:
            while not self.service.stopping.is_set():
                loop.progress()
                if time.monotonic() - renewed > self.config.fleet.ttl_s / LEASE_SHARE:
                    if await self.store.lead(self.service.status.member, self.config.fleet.ttl_s) != fence:
                        return
                    renewed = time.monotonic()
                state = await self.store.state()
                busy = False
                if state is not None and not self.service.view.paused and not state.ended:
                    settled = await self._settle(fence, table, state)
                    if len(table) > self.config.replay.capacity:  # evictions are the server's choice
                        table = await self._read_table()
                    prepared = await self._prepare(fence, table, state)
                    issued = 0 if prepared else await self._issue(fence, table, state)
                    busy = bool(settled or prepared or issued)
                if not busy:
                    await self.bell.wait("headers", "slots", "version", "control", "tickets", timeout=IDLE_S)
        except (Fenced, OutOfOrder) as error:
            log.warning("no longer in step with the run, starting over", error=str(error))
        finally:
            self.metrics.leads.set(0)

    async def _read_table(self) -> Table:
        return Table(await self.store.oldest_groups(self.config.replay.capacity), self.config.replay.max_uses)

    async def _settle(self, fence: int, table: Table, state: RunState) -> int:
        items = await self.store.read_headers(fence, SETTLE_BATCH)
        if not items:
            return 0
        settlements = [settle(item, state.prepared_step + 1, self.config) for item in items]
        await self.store.settle(fence, settlements, self.config.replay.capacity, self.config.replay.remover)
        for settlement in settlements:
            header = settlement.item.header
            self.metrics.settled.labels(settlement.action.partition(":")[0]).inc()
            if settlement.action == "insert" and header is not None:
                table.insert(header)
                self.generated.add(header)
            elif settlement.action.startswith("failed"):
                log.error("header buried", ticket=settlement.item.ticket, reason=settlement.action.partition(":")[2])
        return len(items)

    async def _prepare(self, fence: int, table: Table, state: RunState) -> bool:
        step = state.prepared_step + 1
        if step >= self.config.run.steps or not len(table):
            return False
        waited_s = 0.0 if self._behind_since is None else time.monotonic() - self._behind_since
        decision = admission.decide(table.ready(), await self.store.outstanding(), step, self.rules, waited_s)
        if decision.stale:
            await self.store.sweep(fence, decision.stale)
            table.drop(decision.stale)
        if isinstance(decision, admission.Wait):
            if decision.why == "older_ticket" and self._behind_since is None:
                self._behind_since = time.monotonic()
            return False
        self._behind_since = None
        plan, ranks = self._plan(step, decision.groups, table)
        await self.store.prepare(fence, plan, ranks, (), self.config.replay.max_uses)
        table.draw(decision.groups)
        self.metrics.prepared.inc()
        if decision.overtook:
            self.metrics.overtook.inc()
            log.warning("step made without an older ticket", step=step)
        return True

    def _plan(self, step: int, names: tuple[str, ...], table: Table) -> tuple[StepPlan, list[RankPlan]]:
        groups = [table[name] for name in names]
        given = [advantages.advantages(group.header.rewards, self.config.advantage.kind) for group in groups]
        planned = [
            PlanGroup(
                group.group, group.header.payload, group.header.prompt_tokens, np.asarray(group.header.lengths), advantage,
                advantages.trained(group.header.truncated, self.config.advantage.mask_truncated), group.uses == 0,
            )
            for group, advantage in zip(groups, given, strict=True)
        ]  # fmt: skip
        record = stats.trained([group.header for group in groups], given, step) | self.generated.take()
        return plan_step(step, planned, self.layout, record | {"replay/buffer/groups": float(len(table))})

    async def _issue(self, fence: int, table: Table, state: RunState) -> int:
        max_uses = self.config.replay.max_uses
        live = table.uses_left + [max_uses] * await self.store.outstanding_count()
        wanted = admission.tickets_to_issue(
            live, state.prepared_step + 1, state.published_version, self.config.run.steps, self.rules, max_uses
        )
        self.metrics.buffered.set(len(table))
        self.metrics.slots_used.set(state.slots_used)
        self.metrics.slots.set(state.slots)
        if wanted == 0:
            return 0
        tickets = [self._ticket(position) for position in range(state.cursor, state.cursor + min(wanted, ISSUE_BATCH))]
        issued = await self.store.issue(fence, state.cursor, tickets)
        self.metrics.issued.inc(issued)
        return issued

    def _ticket(self, position: int) -> Ticket:
        epoch, row = self.order.at(position)
        prompt, answer = self.source.prompt(row)
        return Ticket(
            id=f"{epoch}-{row}", seq=position, epoch=epoch, index=row, seed=ticket_seed(self.config.run.seed, epoch, row),
            prompt=prompt, answer=answer, group_size=self.config.sampling.group_size,
        )  # fmt: skip


def ticket_seed(run_seed: int, epoch: int, row: int) -> int:
    """Seed of a ticket, 48 bits: the same prompt gets other samples in another epoch or run, the same ones in the same."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{epoch}/{row}".encode(), digest_size=6).digest(), "little")
