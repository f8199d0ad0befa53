"""Dataprep's main loop: settle finished groups, prepare steps, issue tickets.

Guarantees: only one leader at a time acts, enforced by a fencing number; every hand-over is one atomic function, so a leader
that dies leaves nothing half done and its successor continues from Redis alone; the order of prompts depends on the
configuration and on the rewards of groups settled long ago, never on timing.
Waits for: headers, free slots, a published version, leadership, the end of a snapshot.
Unblocked by: generators (`headers`; `tickets` lost or moved to the dead letters), the trainer (`version`, `slots`, `steps`),
operators (`control`), the end of another leader's lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import structlog

from services.chat.errors import DataError
from services.dataprep.brakes import Failures, MemoryGuard
from services.dataprep.evaluation_rounds import EvaluationRounds
from services.dataprep.metrics import DataprepMetrics
from services.dataprep.planning import step
from services.dataprep.prompts.catalogue import PromptSource
from services.dataprep.prompts.issuing import Issuer
from services.dataprep.replay import admission, generated_statistics
from services.dataprep.replay.settling import settle
from services.groups import replay_weights as replay
from services.protocol.errors import Busy, Fenced, OutOfOrder, StoreError
from services.runtime.loops import Broken, Fatal, Loop, end_tasks
from services.runtime.service import Service
from services.store.records import RunState, SweptTable

log = structlog.get_logger()

TOPICS = ("headers", "slots", "version", "steps", "control", "tickets", "evaluation")
STEP_DOWN_S = 3.0
IDLE_S = 1.0  # the longest delay that a missed notification can cause
OUT_OF_STEP = 5  # turns in a row out of step with the run that make the pod not ready
SNAPSHOT_S = 0.2  # longer than the snapshot of a small table takes
FULL_PHASE = "waiting for memory"
LEASE_SHARE = 3  # renewals per lease of the leadership
SETTLE_BATCH = 256  # headers per call; takes some milliseconds of the server's time
AHEAD = 2  # steps prepared beyond the last committed: one in training, one waiting; drawing later gives fresher groups
SLOW_DRAFT_S, DRAFT_S = 10.0, 1800.0
"""How long a curriculum may take to begin an epoch before this is logged, and before its pod counts as stuck."""


class DataprepLoop:
    """Leads a run, or stands by."""

    def __init__(self, service: Service, source: PromptSource, metrics: DataprepMetrics, evaluation: EvaluationRounds) -> None:
        self.service, self.metrics, self.evaluation = service, metrics, evaluation
        self.store, self.notifications, self.config = service.store, service.notifications, service.config
        self.rules = admission.rules_of(self.config)
        self.issuer = Issuer(self.store, source, self.config, service.tracing)
        self.memory = MemoryGuard(self.store)
        self.failures = Failures(self.store, self.config)
        self.generated = generated_statistics.GeneratedStats(self.config.source_names)
        self._waiting: tuple[str, float] = ("", 0.0)  # why no step can be made, and since when
        self._out_of_step = 0  # turns in a row that did not follow the run's state
        self._why_out_of_step = ""
        self._waits = metrics.wait_clock()
        self._renewed, self._renew_s = 0.0, self.config.fleet.ttl_s / LEASE_SHARE
        metrics.lag_bound.set(self.config.admission.max_staleness)

    def why_unready(self) -> str:
        """Return why this pod is not ready.

        A standby is ready, since it can take over at once. So is a pod whose run is paused or finished: it serves the control
        API, through which the run is resumed or inspected.
        """
        view = self.service.view
        if view.state is None:
            return "the run does not exist yet"
        return "" if view.paused or view.state.ended else self._why_out_of_step or self.memory.why

    async def work(self, loop: Loop) -> None:
        """Lead whenever no other pod does, until stopped."""
        candidate, lease_s = self.service.status.member, self.config.fleet.ttl_s
        try:
            while not self.service.stopping.is_set():
                loop.progress()
                fence = await self.store.run.lead(candidate, lease_s)
                if fence is None:
                    self.service.say(phase="standby", paused=self.service.view.paused)
                    await self.notifications.wait("control", timeout=self._renew_s)
                    continue
                await self._lead(loop, fence)
        except DataError as error:
            raise Fatal(str(error)) from None
        finally:
            with contextlib.suppress(StoreError, TimeoutError):  # without Redis the pod must still exit; its lease expires
                await asyncio.wait_for(self.store.run.step_down(candidate), STEP_DOWN_S)

    async def _lead(self, loop: Loop, fence: int) -> None:
        """Act as the leader until stopped or fenced off."""
        self.service.say(phase="leading")
        self.metrics.leads.set(1)
        log.info("leading", fence=fence)
        self.issuer.forget()
        self.failures.forget()
        self._waiting = ("", 0.0)
        self._renewed = time.monotonic()
        incarnation: int | None = None
        try:
            while not self.service.stopping.is_set():
                loop.progress()
                if time.monotonic() - self._renewed > self._renew_s and not await self._renew(fence):
                    return
                state = await self.store.run.state()
                if state is None:
                    raise Broken(f"run {self.config.run.name!r} vanished from Redis")  # a restarted process creates it again
                incarnation = state.incarnation if incarnation is None else incarnation
                try:
                    busy = await self._hold(loop, fence, self._act(fence, state))
                except Busy:  # a snapshot is being taken; everything done before it stands
                    await self.notifications.wait("control", timeout=SNAPSHOT_S)
                    continue
                self._out_of_step, self._why_out_of_step = 0, ""
                if not busy:
                    await self.notifications.wait(*TOPICS, timeout=IDLE_S)
        except (Fenced, OutOfOrder) as error:
            state = await self.store.run.state()
            if state is not None and incarnation not in (None, state.incarnation):
                log.info("the run is restored to a checkpoint, leading it again")
            else:
                log.warning("superseded or out of step with the run, starting over", error=str(error))
                if isinstance(error, OutOfOrder):
                    await self._pause_out_of_step(error)
        finally:
            self.metrics.leads.set(0)
            self._waits.enter("")

    async def _pause_out_of_step(self, error: OutOfOrder) -> None:
        """Wait before the next attempt, unless this was the first: the run's state is read again, which may not help."""
        self._out_of_step += 1
        if self._out_of_step >= OUT_OF_STEP:
            self._why_out_of_step = f"out of step with the run {self._out_of_step} times in a row, the last time: {error}"
        if self._out_of_step > 1:
            await self.notifications.wait("control", timeout=IDLE_S)

    async def _renew(self, fence: int) -> bool:
        """Renew the lease of the leadership; return False if it is lost."""
        asked = time.monotonic()
        if await self.store.run.lead(self.service.status.member, self.config.fleet.ttl_s) != fence:
            return False
        self._renewed = asked
        return True

    async def _hold(self, loop: Loop, fence: int, acting: Coroutine[Any, Any, bool]) -> bool:
        """Wait for a turn. While a slow curriculum begins an epoch, renew the lease, up to `DRAFT_S`, and stop when told to.

        Raises `Fenced` if the leadership is lost.
        """
        turn, told = asyncio.create_task(acting), False
        try:
            while not (await asyncio.wait({turn}, timeout=min(self._renew_s, IDLE_S)))[0]:
                if not 0 < self.issuer.drafting_s < DRAFT_S:
                    continue  # a turn that hangs: the lease expires, and the pod's liveness ends
                if self.issuer.drafting_s > SLOW_DRAFT_S and not told:
                    told = True
                    log.warning("the curriculum takes long to begin an epoch", seconds=round(self.issuer.drafting_s, 1))
                loop.progress()
                if self.service.stopping.is_set():
                    return False
                leads = True
                if time.monotonic() - self._renewed > self._renew_s:
                    with contextlib.suppress(StoreError):  # the turn's next call reports it
                        leads = await self._renew(fence)
                if not leads:
                    raise Fenced(f"leader_fence {fence} was superseded")
            return turn.result()
        finally:
            await end_tasks([turn])

    async def _act(self, fence: int, state: RunState) -> bool:
        """Do one turn of everything the leader does, and return whether anything was done. An ending run only gets its evaluation
        round closed."""
        paused = self.service.kind in state.paused
        self.service.say(paused=paused)
        trains = not paused and not state.ended
        if not trains:
            self._waits.enter("")
        if paused or "generator" in state.paused:
            self._waiting = (self._waiting[0], time.monotonic())  # no ticket can end: that is no reason to overtake it
        busy = trains and await self._turn(fence, state)
        return await self.evaluation.tend(fence, state) or busy

    async def _turn(self, fence: int, state: RunState) -> bool:
        """Settle, then make a step or else issue tickets. Return whether anything was done."""
        next_step, wanted = state.prepared_step + 1, self.config.admission.prompts_per_step
        base = await self._rebase(fence, next_step)
        settled = await self._settle(fence, next_step, base)
        oldest_fresh = next_step - self.config.admission.max_staleness
        swept = await self.store.replay.sweep_and_peek(fence, oldest_fresh, wanted, self.rules.replaced)
        self.metrics.stale.inc(swept.stale)
        again = await self.issuer.issue_again(fence) if swept.reissue else 0
        if 0 < again < swept.reissue:
            return True
        prepared = await self._prepare(fence, state, swept, oldest_fresh)
        if again < swept.reissue:  # the rest waits for slots, and comes before new prompts
            return bool(prepared or settled)
        return bool(prepared or await self._issue(fence, state, swept) or settled or again)

    async def _settle(self, fence: int, next_step: int, base: int) -> int:
        items = await self.store.replay.read_headers(fence, SETTLE_BATCH)
        if not items:
            return 0
        started = time.monotonic()
        settlements = [settle(item, next_step, self.config, base) for item in items]
        await self.store.replay.settle(fence, settlements)
        self.metrics.settle_s.observe(time.monotonic() - started)
        for settlement in settlements:
            kind, _, reason = settlement.action.partition(":")
            action = kind if kind == "failed" else settlement.action
            self.metrics.settled[action].inc()
            if settlement.item.header is not None:
                self.service.tracing.record("settle", settlement.item.header.trace, started, action=action)
            if kind == "failed":
                log.error("header moved to dead letters", ticket=settlement.item.ticket, reason=reason)
            elif settlement.item.header is not None:
                self.generated.add(settlement.item.header)
                self.failures.succeeded()
            if kind != "insert":
                self.generated.drop(settlement.action)
        return len(items)

    async def _prepare(self, fence: int, state: RunState, swept: SweptTable, oldest_fresh: int) -> bool:
        number = state.prepared_step + 1
        if number >= self.config.run.steps or number > state.committed_step + AHEAD:
            self._waits.enter("ahead" if number < self.config.run.steps else "")
            return False
        why, since = self._waiting
        waited_s = time.monotonic() - since if why == "older_ticket" else 0.0
        decision = admission.decide(swept, self.rules, waited_s)
        self._waits.enter(decision.why if isinstance(decision, admission.Wait) else "")
        if isinstance(decision, admission.Wait):
            if decision.why != why:
                self._waiting = (decision.why, time.monotonic())
            return False
        self._waiting = ("", 0.0)
        if isinstance(decision, admission.PassOver):
            log.warning("step skipped: every group of its prompts was filtered", step=number)
            await self.store.replay.pass_over(fence, decision.gaps_until)
            self.metrics.passed_over.inc()
            return True
        with structlog.contextvars.bound_contextvars(step=number):
            await self._draw(fence, number, swept, decision, oldest_fresh)
        return True

    async def _draw(self, fence: int, number: int, swept: SweptTable, decision: admission.Prepare, oldest_fresh: int) -> None:
        started = time.monotonic()
        groups = await self.store.replay.groups(decision.groups)
        plan, ranks = step.make_step(number, groups, swept, self.generated, self.config)
        variates = [replay.exponential(self.config.run.seed, group.group, group.uses + 1) for group in groups]
        await self.store.steps.prepare(fence, plan, ranks, oldest_fresh, variates, decision.gaps_until)
        self.generated.next_step([group.header for group in groups])
        self.metrics.prepared.inc()
        self.metrics.plan_s.observe(time.monotonic() - started)
        for group in groups:
            self.metrics.lag.observe(number - min(group.header.oldest))
            self.service.tracing.record("plan", group.header.trace, started, step=number, uses=group.uses + 1)
        if len(groups) < self.config.admission.prompts_per_step:
            self.metrics.short.inc()
            log.warning("step is short: filters dropped more groups than may be replaced", groups=len(groups))
        if decision.overtook:
            self.metrics.overtook.inc()
            log.warning("step made without waiting for an older ticket")

    async def _rebase(self, fence: int, next_step: int) -> int:
        """Keep recency weights within the precision of the clocks, and return the base that they are relative to."""
        if self.config.replay.priority != "recency":
            return 0
        wanted = replay.recency_base(next_step)
        while (base := await self.store.replay.recency_base()) < wanted:
            await self.store.replay.rescale(fence, base, wanted, replay.recency_weight(base - wanted))
        return wanted

    async def _issue(self, fence: int, state: RunState, swept: SweptTable) -> int:
        """Issue as many tickets as there are free slots and prompts, unless one after another fails. If no prompt is left and the
        table cannot fill a step, end the run; that is an outcome, not a fault."""
        progress = admission.progress_of(state)
        wanted = admission.tickets_to_issue(swept, progress, self.rules)
        if full := await self.memory.full():
            wanted = 0
        if full != (self.service.status.phase == FULL_PHASE):
            self.service.say(phase=FULL_PHASE if full else "leading")
        if wanted and await self.failures.pause():
            return 0
        issued = await self.issuer.issue(fence, state.cursor, wanted, swept) if wanted else 0
        ending = progress.next_step < progress.steps and state.restore < 0  # otherwise it ends, or goes back, by itself
        left = issued or swept.requeued  # requeued tickets may wait for memory
        if self.issuer.exhausted and not left and ending and admission.stuck(swept, replace(progress, free_slots=0), self.rules):
            await self.store.run.stop(self.issuer.exhausted)
        self.metrics.issued.inc(issued)
        return issued
