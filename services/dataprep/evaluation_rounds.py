"""The leader's part of evaluation rounds: open, watch, report or abandon them (docs/evaluation.md).

Guarantees: at most one round is open at a time. It is reported once, when every prompt is answered by the round's version alone,
or abandoned with a reason that is counted and logged; either way all its keys are deleted. `tend` does one turn and never waits.

A round opens as soon as the step that makes its version is planned, before the version exists. It is therefore open when the
first generator holds the version, and generators can stay on that version before the next sync round begins.
"""

from __future__ import annotations

import time

import structlog

from services.config import RunConfig
from services.config.evaluation import FINAL_S
from services.dataprep.evaluation_report import Unfit, read_results, report
from services.dataprep.metrics import EvaluationMetrics
from services.dataprep.prompts.catalogue import PromptSource
from services.groups.replay_weights import drawn
from services.protocol.messages import PodStatus, Ticket
from services.runtime.tracing import TraceRecorder
from services.store import RunState, Store
from services.store.evaluation import EvaluationRound

log = structlog.get_logger()

POLL_S = 0.25  # seconds between polls of an open round


class EvaluationRounds:
    """Runs the evaluation rounds of a run on behalf of its leader."""

    def __init__(
        self, config: RunConfig, store: Store, source: PromptSource | None, metrics: EvaluationMetrics, tracing: TraceRecorder
    ) -> None:
        """`source` holds the rows of `evaluation.sources`, or is None if evaluation is off."""
        self.metrics, self.tracing = metrics, tracing
        self._traces: dict[int, tuple[str, float]] = {}  # trace and start of the round that this process opened
        self.config, self.given, self.store, self.source = config, config.evaluation, store, source
        self._fence = 0
        self._dealt_with = -1
        self._open: int | None = None  # version of the open round
        self._look_at = 0.0
        self._last_since: float | None = None  # when the last version was first seen published

    async def tend(self, fence: int, state: RunState) -> bool:
        """Do one turn of the leader and return whether anything was done. Raises `Fenced` if another process leads."""
        now = time.monotonic()
        if fence != self._fence or (self._open is not None and now >= self._look_at):
            return await self._look(fence, state, now)
        return self._open is None and await self._open_next(fence, state)

    async def _look(self, fence: int, state: RunState, now: float) -> bool:
        seen = await self.store.evaluation.state(self.config.fleet.ttl_s)
        self._fence, self._dealt_with, self._look_at = fence, seen.dealt_with, now + POLL_S
        self._open = seen.round.version if seen.round else None
        if seen.round is None:
            return False
        if self.source is None:  # the run was resumed with other settings
            await self._abandon(fence, seen.round, "evaluation.every_steps is 0 now")
            return True
        if seen.round.done == seen.round.total and not seen.round.fault:
            await self._close(fence, seen.round, state.incarnation)
            return True
        members = []
        if state.published_version > seen.round.version and not seen.round.volunteers:
            members = await self.store.fleet.members(self.config.fleet.ttl_s)
        if state.published_version < state.steps:
            self._last_since = None
        elif self._last_since is None:
            self._last_since = now
        last_s = 0.0 if self._last_since is None else now - self._last_since
        if reason := hopeless(seen.round, state, members, last_s, FINAL_S):
            await self._abandon(fence, seen.round, reason)
            return True
        return False

    async def _open_next(self, fence: int, state: RunState) -> bool:
        due = self.given.next_version(self._dealt_with, state.steps)
        if due is None or state.ended or due > state.prepared_step + 1:
            return False
        late, last = 0, self._dealt_with
        while due is not None and due < state.published_version:  # the fleet has moved past it
            late, last = late + 1, due
            due = self.given.next_version(due, state.steps)
        if late:
            if await self.store.evaluation.skip(fence, last, late):
                self.metrics.rounds["skipped"].inc(late)
            log.warning("evaluation rounds skipped: newer weights are already published", last=last, skipped=late)
            self._dealt_with = last
            return True
        assert due is not None
        trace, began = self.tracing.begin(always=True), time.monotonic()
        tickets = self.tickets(due, trace)
        opened = await self.store.evaluation.open(fence, due, tickets, self.config.sources_with_environment)
        self.tracing.issued([trace], done=opened)
        if opened:
            self._traces = {due: (trace, began)}
            log.info("evaluation round opened", version=due, prompts=len(tickets))
        self._dealt_with = self._open = due
        return True

    async def _close(self, fence: int, found: EvaluationRound, incarnation: int) -> None:
        tickets = self.tickets(found.version)
        try:
            results = read_results(tickets, await self.store.evaluation.results())
        except Unfit as fault:
            await self._abandon(fence, found, str(fault))
            return
        record = report(results, self.given.ks) | {
            "eval/version": float(found.version),
            "eval/wall_s": found.wall_s,
            "time_s": time.time(),
            "run/incarnation": float(incarnation),
        }
        await self.store.evaluation.report(fence, found.version, record)
        self.metrics.complete(record, sum(len(result.rewards) for result in results))
        self._ended(found, "complete")
        log.info("evaluation round complete", **{name: round(value, 4) for name, value in record.items()})

    async def _abandon(self, fence: int, found: EvaluationRound, reason: str) -> None:
        await self.store.evaluation.abandon(fence, found.version, reason)
        self.metrics.rounds["abandoned"].inc()
        self._ended(found, "abandoned")
        log.warning("evaluation round abandoned", version=found.version, done=found.done, total=found.total, reason=reason)

    def _ended(self, found: EvaluationRound, outcome: str) -> None:
        """Record the end of a round. One that another process opened gets no span, since its trace is unknown here."""
        self._open = None
        trace, began = self._traces.pop(found.version, ("", 0.0))
        self.tracing.record("evaluate", trace, began, version=found.version, outcome=outcome, prompts=found.done)

    def tickets(self, version: int, trace: str = "") -> list[Ticket]:
        """Return the round's tickets, always the same ones except for `trace` and `version`; `index` is the row.

        A prompt has the same seeds in every round, so that rounds differ only by policy.
        """
        assert self.source is not None
        tickets: list[Ticket] = []
        for span in self.source.spans:
            for index in range(min(span.rows, self.given.prompts or span.rows)):
                prompt = self.source.prompt(span.first + index)
                ticket = Ticket(
                    id=f"{span.name}:{index}",
                    seq=len(tickets),
                    epoch=0,
                    index=index,
                    seed=drawn(48, "evaluation", self.config.run.seed, span.name, index),
                    prompt=prompt.tokens,
                    answer=prompt.answer,
                    group_size=self.given.samples,
                    source=span.name,
                    trace=trace,
                    row=prompt.row,
                    version=version,
                )
                tickets.append(ticket)
        return tickets


def hopeless(found: EvaluationRound, state: RunState, members: list[PodStatus], last_s: float, final_s: float) -> str:
    """Return why an incomplete round can never complete or is not worth waiting for, or "" if it continues.

    `members` are the live pods. `last_s` is how long ago the last version of the run was published.
    """
    if found.fault:
        return found.fault
    if state.ended:
        return f"the run is ending: {state.stopping or state.finished}"
    holders = found.volunteers or sum(pod.kind == "generator" and pod.version == found.version for pod in members)
    if state.published_version > found.version and not holders:
        if found.started:
            return f"no generator has version {found.version} anymore"
        return (
            f"no generator stayed on version {found.version} before version {state.published_version} was published: none could "
            "be spared, since one generator keeps training, or the round opened late because another was open"
        )
    if last_s > final_s:
        return f"the last version has been published for {final_s:g} s, and the round is not complete"
    return ""
