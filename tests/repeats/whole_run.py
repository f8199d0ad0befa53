"""A whole run in one process, with all callers of the store and every function.

Guarantees: like services, the actors decide only by what the store replies, so the run ends the same whatever happens to
individual replies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from services.operations.inspection.ledger import assess
from services.protocol.errors import Busy
from services.protocol.messages import PodStatus, Round, Ticket
from services.store import Claim, HeaderEntry, RunState, Settlement, Store
from services.store.facet import ordinal
from services.store.records import TableRules
from services.store.snapshot_format import Snapshot
from services.store.tickets import TurnPlace
from tests.support import flow
from tests.support.harness import ticket

ENVIRONMENT = "agents"  # the source whose tickets environments claim
ACTORS = ("console", "leader", "trainer", "g0", "g1")
STEPS, PER_STEP, SLOTS = 6, 3, 9
RESTORED = 2  # the step that RESTORED_AFTER is restored to
RESTORED_AFTER = 4
LEASE_S, TTL_S = 0.2, 60.0
PATIENCE_S = 60.0
PHASES = (("gather", "present"), ("join", "joined"), ("pause", "ready"), ("transfer", "applied"), ("done", ""))
T = TypeVar("T")


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a run."""

    ledger: dict[str, int]
    trained: int
    plans: dict[int, list[str]]
    letters: list[str]


class WholeRun:
    """One run; `stores` has a store for each of `ACTORS`."""

    def __init__(self, stores: dict[str, Store], folder: Path) -> None:
        self.stores, self.folder = stores, folder
        self.console, self.leader, self.trainer = (stores[name] for name in ("console", "leader", "trainer"))
        self.leads = self.trains = 0  # fences
        self.attempt = 0
        self.tries: dict[str, int] = {}
        self.plans: dict[int, list[str]] = {}

    async def run(self) -> RunOutcome:
        """Run from creation to the end."""
        await self._begin()
        restored = False
        for _ in range(200):
            state = await self.state()
            if state.committed_step == STEPS - 1:
                break
            if state.committed_step == RESTORED_AFTER and not restored:
                restored = True
                await self._restore()
                continue
            await self._turn(state.prepared_step + 1)
        await self.trainer.run.finish("trained all", self.trains)
        for name in ("g0", "g1"):
            await self.stores[name].fleet.leave(_pod(name))
        await self.leader.run.step_down("leader:boot")
        return await self._outcome()

    async def state(self) -> RunState:
        state = await self.console.run.state()
        assert state is not None
        return state

    async def _begin(self) -> None:
        await self.leader.run.create("config", "dataset", STEPS, SLOTS, TableRules("prioritized", "lowest_priority", 40, 2))
        await self.leader.run.set_steps(STEPS)
        for name in ("g0", "g1"):
            await self.stores[name].fleet.beat(_pod(name), TTL_S)
        assert len(await self.trainer.fleet.members(TTL_S)) == 2
        self.trains = await self.trainer.run.attach_trainer()
        await self._lead()
        await self.console.run.pause("generator", "for a test")
        await self.console.run.resume("generator")
        await self.leader.run.pause_failing("for a test", "1-1")
        await self.console.run.resume("dataprep")
        await self._publish(0)

    async def _lead(self) -> None:
        async def lead() -> bool:
            self.leads = await self.leader.run.lead("leader:boot", TTL_S) or 0
            return self.leads > 0

        await _until(lead)

    async def _turn(self, step: int) -> None:
        """Issue, generate, settle, prepare and train one step."""
        await self._issue()
        await self._generate()
        await self._led(self._settle)
        await self._led(lambda: self._prepare(step))
        await self._train()

    async def _led(self, act: Callable[[], Awaitable[T]]) -> T:
        """Act as the leader once no snapshot is in progress."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    return await act()
                except Busy:
                    await asyncio.sleep(0.01)

    async def _issue(self) -> None:
        async def issue() -> None:
            again = await self.leader.tickets.reissue(100)
            await self.leader.tickets.issue_again(
                self.leads, [_ticket(int(name.partition("-")[2])) for name, _ in again], {ENVIRONMENT}
            )
            state = await self.state()
            requeued = await self.leader.tickets.requeued(1)
            rows = [int(name.partition("-")[2]) for name in requeued]
            free = state.slots - state.slots_used - len(requeued)
            new = state.cursor - (await self.console.run.audit()).get("ledger:issued", 0)  # requeued ones are not counted again
            rows += range(state.cursor - new, state.cursor - new + max(0, free))
            if rows[: state.slots - state.slots_used]:
                tickets = [_ticket(row) for row in rows]
                await self.leader.tickets.issue(
                    self.leads, state.cursor, tickets, b"order", {"main": b"rows"}, len(requeued), {ENVIRONMENT}
                )

        await self._led(issue)

    async def _generate(self) -> None:
        """Claim and submit until nothing is left to claim."""

        async def done() -> bool:
            state = await self.state()
            for name in ("g0", "g1"):
                tickets = self.stores[name].tickets
                for rollouts in (False, True):
                    _, claims = await tickets.claim(
                        name, state.published_version, state.published_by, LEASE_S, 3, max_expiries=10_000, rollouts=rollouts
                    )
                    assert (await tickets.claim(name, state.published_version, state.published_by, LEASE_S, 0))[1] == []
                    for claim in claims:
                        assert claim.ticket is not None
                        assert (claim.ticket.source == ENVIRONMENT) == rollouts
                        await self._complete(name, claim)
            return (await self.console.run.audit())["tickets"] == 0

        await _until(done)

    async def _complete(self, name: str, claim: Claim) -> None:
        """Make some rows fail or be released before they are submitted."""
        tickets, row = self.stores[name].tickets, int(claim.ticket_id.partition("-")[2])
        tries = self.tries[claim.ticket_id] = self.tries.get(claim.ticket_id, 0) + 1
        await tickets.save_partial(name, claim, b"tokens so far", 60)
        await tickets.renew(name, [claim])
        if claim.ticket is not None and claim.ticket.source == ENVIRONMENT:
            await self._take_turns(name, claim)
        if row % 5 == 2 and tries == 1:
            await tickets.release(name, claim, 7)
        elif row % 5 == 3 and tries == 1:
            await tickets.fail(name, claim, "the verifier broke", 100)
        elif row == 6 and tries == 1:
            await tickets.fail(name, claim, "its bytes are no ticket", 1)
        else:
            oldest = max(0, (await self.state()).published_version)
            await flow.submit(self.stores[name], name, claim, oldest)

    async def _take_turns(self, name: str, claim: Claim) -> None:
        """Continue one rollout from its records, or restart it."""
        tickets = self.stores[name].tickets
        restarts, records = (await tickets.turns(claim.ticket_id)).get(0, (0, []))
        if len(records) > 1:
            restarts, records = restarts + 1, []
            assert await tickets.restart_rollout(name, claim, 0, restarts, 60)
        for place in range(len(records), len(records) + 2):
            assert await tickets.commit_turn(name, claim, TurnPlace(0, restarts, place), b"a turn", 60)
        assert (await tickets.turns(claim.ticket_id))[0] == (restarts, [*records, b"a turn", b"a turn"])

    async def _settle(self) -> None:
        items = await self.leader.replay.read_headers(self.leads, 100)
        settlements = [self._settlement(item) for item in items]
        await self.leader.replay.settle(self.leads, settlements)

    def _settlement(self, item: HeaderEntry) -> Settlement:
        row = int(item.ticket.partition("-")[2])
        if row % 7 == 4:
            return Settlement(item, "filtered:zero", rate=(row, 0.0, 0.5))
        return Settlement(item, "insert", 0, 1.0 + row % 4, (row + 1) / 40, (row, 0.5, 0.5 + row % 2 / 4))

    async def _prepare(self, step: int) -> None:
        await self.leader.replay.rescale(self.leads, step - 1 if step else 0, step, 0.5) if step == 1 else None
        swept = await self.leader.replay.sweep_and_peek(self.leads, 0, PER_STEP)
        if step == 3:
            await self.leader.replay.pass_over(self.leads, max(swept.gaps, default=-1))
        groups = [group for group, _ in swept.first]
        assert len(groups) == PER_STEP
        variates = [(step + 1) / (place + 2) for place in range(PER_STEP)]
        await self.leader.steps.prepare(self.leads, *flow.plan(step, groups), 0, variates, 3 * step)

    async def _train(self) -> None:
        step = (await self.state()).committed_step + 1
        plan = await self.trainer.steps.plan(step)
        assert plan is not None
        if step == 1 and len(plan.groups) == PER_STEP:
            bad, left = plan.groups[0], plan.groups[1:]
            prepared = (await self.state()).prepared_step
            await self.trainer.steps.discard_damaged(self.trains, step, prepared, {bad: "it is gone"}, [flow.plan(step, left)])
        plan = await self.trainer.steps.plan(step)
        assert plan is not None
        self.plans[step] = plan.groups
        await self.trainer.steps.commit(self.trains, step)
        await self.trainer.monitor.record({"step": float(step)})
        await self.trainer.replay.reweigh(self.trains, dict.fromkeys(plan.groups, 0.5 + step))
        await self._publish(step + 1)
        await self._evaluate(step + 1)
        if step in (RESTORED, STEPS - 1):
            await self._checkpoint(step)
        if step == 2:
            letters = [letter.id for letter in await self.console.dead_letters.page() if letter.failed]
            await self.console.dead_letters.requeue(sorted(letters))

    async def _publish(self, version: int) -> None:
        """Run one round of weight sync, then publish."""
        self.attempt += 1
        members = {_pod(name).member: rank for rank, name in enumerate(("g0", "g1"), 1)}
        for phase, stage in PHASES:
            round = Round(1, version, phase, members, 3, "gloo", "127.0.0.1", 1, self.attempt, self.trains)
            await self.trainer.fleet.set_round(self.trains, round)
            for name in ("g0", "g1"):
                fleet, member = self.stores[name].fleet, _pod(name).member
                held = await fleet.round_of(member)
                assert held is not None
                assert held.phase == phase
                if stage:
                    await fleet.acknowledge(member, held.attempt, stage)
            acks = (await self.trainer.fleet.round())[1]
            assert not stage or {stage for stage, _ in acks.values()} == {stage}
        await self.trainer.steps.publish(self.trains, version)

    async def _evaluate(self, version: int) -> None:
        """Report one round, abandon another, and skip versions."""
        rounds, member = self.leader.evaluation, _pod("g0").member
        if version not in (1, 2):
            await self._led(lambda: rounds.skip(self.leads, version, 1))
            return
        await self._led(lambda: rounds.open(self.leads, version, [ticket(900), ticket(901, source=ENVIRONMENT)], {ENVIRONMENT}))
        await self.stores["g1"].fleet.beat(_pod("g1"), TTL_S)
        if version == 2:
            await self.stores["g0"].evaluation.volunteer(member, version, self.trains, TTL_S, LEASE_S, 1, 0)
            await self.stores["g0"].evaluation.resign(member)
            await self._led(lambda: rounds.abandon(self.leads, version, "a test"))
            return
        mine = self.stores["g0"]
        await mine.evaluation.volunteer(member, version, self.trains, TTL_S, LEASE_S, 1, 0)
        failed = False

        async def done() -> bool:
            nonlocal failed
            for rollouts in (False, True):
                _, claims = await mine.tickets.claim(
                    "g0", version, self.trains, LEASE_S, 1, max_expiries=10_000, rollouts=rollouts, evaluates=True
                )
                for claim in claims:
                    await mine.tickets.renew("g0", [claim])
                    if not failed:
                        failed = True
                        await mine.tickets.fail("g0", claim, "the verifier broke", 100)
                    else:
                        await mine.tickets.submit("g0", claim, flow.header(claim), b"", 60)
            round = (await rounds.state(TTL_S)).round
            return round is not None and round.done == round.total

        await _until(done)
        await mine.evaluation.resign(member)
        assert len(await rounds.results()) == 2
        await self._led(lambda: rounds.report(self.leads, version, {"eval/version": float(version)}))

    async def _checkpoint(self, step: int) -> None:
        await self.console.run.request_checkpoint("a test")
        await self.trainer.snapshots.save(self.trains, step, self.folder / str(step), payloads=True)
        token = ordinal()  # a long snapshot, unlike `save` in a small run
        await self.trainer.connection.call("snapshot_begin", self.trains, token, 1000)
        await self.trainer.connection.call("snapshot_hold", self.trains, token, 1000)
        await self.trainer.connection.call("snapshot_end", self.trains, token)
        await self.trainer.steps.checkpointed(self.trains, step)
        await self._log_samples(step)
        await self.trainer.steps.retire()
        assert (await self.state()).checkpoint == "", "the request was met"

    async def _log_samples(self, step: int) -> None:
        waiting = await self.trainer.samples.waiting(100)
        await self.trainer.samples.log((await self.state()).incarnation, step, 1.0, TTL_S, [one.entry for one in waiting])

    async def _restore(self) -> None:
        """Restore a checkpoint with a new trainer and a new leader."""
        await self.console.run.request_restore(RESTORED)
        self.trains = await self.trainer.run.attach_trainer()
        snapshot = Snapshot(self.folder / str(RESTORED))
        await self.trainer.restores.restore(self.trains, snapshot, True, lambda: None)
        state = await self.state()
        assert (state.restoring, state.restore, state.committed_step) == (-1, -1, RESTORED)
        await self._lead()
        await self._publish(state.published_version)

    async def _outcome(self) -> RunOutcome:
        audit = await self.console.run.audit()
        report = assess("run", audit)
        assert report.ok, report.messages
        counted = {name: count for name, count in audit.items() if name.startswith("ledger:") and name not in CALLS_COUNTED}
        letters = [letter.ticket for letter in await self.console.dead_letters.page()]
        trained = int(await self.console.client.bitcount(self.console.keys.trained(0)))
        return RunOutcome(counted, trained, dict(sorted(self.plans.items())), letters)


CALLS_COUNTED = ("ledger:refused_submits",)  # counters of calls, which count repeats, too


def _ticket(row: int) -> Ticket:
    return ticket(row, source=ENVIRONMENT if row % 2 else "main")


def _pod(name: str) -> PodStatus:
    return PodStatus("generator", name, "boot", "h", 1, "", "ready", 0, 1, {})


async def _until(true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await true():
            await asyncio.sleep(0.01)
