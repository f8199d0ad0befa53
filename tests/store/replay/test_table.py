"""The replay table against a model in plain Python, under random calls of random callers, some of which die between calls.

Any call may be repeated, may be its caller's last, or may come from a superseded leader or trainer. After every
call the whole table in Redis is compared with the model, and every ticket that was issued is accounted for.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from services.console.run.redis_server import RedisServer
from services.operations.inspection.ledger import assess
from services.protocol.errors import Fenced, OutOfOrder, StoreError
from services.protocol.keys import Keys
from services.store import Store
from services.store.records import Settlement, TableRules
from tests.store.replay import tables
from tests.store.replay.table_model import Model
from tests.store.replay.tables import Entry
from tests.support import flow

KEYS = (
    r"run|answers|answers:order|claimed|order|ledger|drops|drops:order|departed|tickets|tickets:rollouts|headers|outstanding|replay:(order|version|clock:\d|idle|weight|state|gaps)|"
    r"trained:0|step:\d+|(group|payload):0-\d+(\.\d+)?"
)
weights = st.sampled_from([0.0, 0.0, 1e-9, 0.25, 1.0, 1.0, 3.7, 1e9]) | st.floats(1e-9, 1e9)
variates = st.floats(1e-6, 20.0)
twice = st.sampled_from([False, False, False, True])


class TableMachine(RuleBasedStateMachine):
    """A run and all of its callers."""

    runner: asyncio.Runner
    store: Store
    sampler: str

    def __init__(self) -> None:
        super().__init__()
        self.store.connection.keys = Keys(f"t-{uuid.uuid4().hex[:12]}")
        self.store = Store(self.store.connection)  # of another run
        self.version = 0  # the fleet's policy version
        self.waiting: dict[str, int] = {}  # unsettled groups and their oldest versions
        self.base = 0

    def call(self, awaitable: Awaitable[Any]) -> Any:
        async def awaited() -> Any:
            return await awaitable

        return self.runner.run(awaited())

    def calls(self, make: Callable[[], Awaitable[Any]], again: bool) -> Any:
        """Make the call once, or twice as after a lost reply; return the first reply."""
        answer = self.call(make())
        if again:
            self.call(make())
        return answer

    @initialize(remover=st.sampled_from(tables.REMOVERS), capacity=st.integers(1, 7), max_uses=st.integers(0, 3))
    def begin(self, remover: str, capacity: int, max_uses: int) -> None:
        self.model = Model(self.sampler, remover, capacity, max_uses)
        rules = TableRules(self.sampler, remover, capacity, max_uses)
        self.team = self.call(flow.start(self.store, slots=tables.MANY_SLOTS, table=rules))
        self.leaders, self.trainers = [self.team.leader], [self.team.trainer]

    @rule(ages=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def arrive(self, ages: list[int]) -> None:
        """Generate groups for the next leader to settle."""
        oldest = [max(self.version - age, 0) for age in ages]
        names = self.call(tables.arrive(self.store, self.team, oldest))
        self.waiting |= dict(zip(names, oldest, strict=True))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), count=st.integers(1, 6), again=twice)
    def settle(self, data: st.DataObject, count: int, again: bool) -> None:
        items = self.call(self.store.replay.read_headers(self.team.leader, count))
        assert len(items) == min(count, len(self.waiting))
        settlements = []
        for item in items:
            name, seq, oldest = item.ticket, int(item.ticket[2:]), self.waiting.pop(item.ticket)
            action = data.draw(st.sampled_from(["insert"] * 6 + ["filtered:zero", "stale"]))
            entry = Entry(data.draw(weights), data.draw(variates), oldest)
            settlements.append(Settlement(item, action, oldest, entry.weight, entry.variate))
            if action == "insert":
                self.model.insert(name, seq, entry)
            else:
                self.model.drops[name] = action
        assert self.calls(lambda: self.store.replay.settle(self.team.leader, settlements), again) == len(items)

    @rule(age=st.integers(0, 3), wanted=st.integers(1, 4), again=twice)
    def look(self, age: int, wanted: int, again: bool) -> None:
        """Sweep without drawing, which removes stale groups."""
        sweep_and_peek = self.calls(lambda: self.store.replay.sweep_and_peek(self.team.leader, self.version - age, wanted), again)
        assert sweep_and_peek.stale == self.model.sweep(self.version - age)
        self.model.check_first([name for name, _ in sweep_and_peek.first], wanted)
        assert sweep_and_peek.size == len(self.model.groups)

    @rule(data=st.data(), age=st.integers(1, 3), wanted=st.integers(1, 4), again=twice)
    def step(self, data: st.DataObject, age: int, wanted: int, again: bool) -> None:
        """Sweep and prepare a step; sometimes the trainer changes a weight in between."""
        sweep_and_peek = self.call(self.store.replay.sweep_and_peek(self.team.leader, self.version - age, wanted))
        self.model.sweep(self.version - age)
        drawn = [name for name, _ in sweep_and_peek.first]
        self.model.check_first(drawn, wanted)
        if not drawn:
            return
        if data.draw(st.integers(0, 4)) == 0:
            self.reweigh(data, False)
        given = data.draw(st.lists(variates, min_size=len(drawn), max_size=len(drawn)))
        plan = flow.plan(len(self.model.steps), drawn)
        fits = self.model.fits(drawn) if self.model.clocked else True
        try:
            self.calls(lambda: self.store.steps.prepare(self.team.leader, *plan, self.version - age, given), again)
        except OutOfOrder:
            assert not fits
        else:
            assert fits is not False
            self.model.prepare(drawn, given)

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data())
    def step_that_cannot_be(self, data: st.DataObject) -> None:
        names = sorted(self.model.groups, key=lambda name: self.model.groups[name].seq)
        one = data.draw(st.sampled_from(names))
        oldest_fresh = 0
        match data.draw(st.sampled_from(["gone", "twice", "stale", "late", "variates"])):
            case "gone":
                drawn = [one, "0-999999"]
            case "twice":
                drawn = [one, one]
            case "stale":
                drawn, oldest_fresh = [one], self.model.groups[one].oldest + 1
            case "late":
                drawn = names[: data.draw(st.integers(1, len(names)))]
                if not self.model.clocked or self.model.fits(drawn) is not False:
                    return
            case _:
                if not self.model.clocked:
                    return
                drawn = [name for name, _ in self.call(self.store.replay.sweep_and_peek(self.team.leader, 0, 2)).first]
                plan = flow.plan(len(self.model.steps), drawn)
                with pytest.raises(StoreError, match="variates"):
                    self.call(self.store.steps.prepare(self.team.leader, *plan, 0, [1.0] * (len(drawn) - 1)))
                return
        plan = flow.plan(len(self.model.steps), drawn)
        with pytest.raises(OutOfOrder):
            self.call(self.store.steps.prepare(self.team.leader, *plan, oldest_fresh, [1.0] * len(drawn)))

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data(), again=twice)
    def reweigh(self, data: st.DataObject, again: bool) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.model.groups)), min_size=1, unique=True))
        new = {name: data.draw(weights) for name in names}
        there = self.calls(lambda: self.store.replay.reweigh(self.team.trainer, new | {"0-999999": 1.0}), again)
        assert there == (len(new) if self.model.weighted else 0)
        for name, weight in new.items() if self.model.weighted else ():
            self.model.reweigh(name, weight)

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data(), bad=st.sampled_from([float("nan"), float("inf"), -1.0, -1e-30, 1.1e9]))
    def reweigh_badly(self, data: st.DataObject, bad: float) -> None:
        """Check that one invalid weight causes the whole update to be rejected."""
        names = data.draw(st.lists(st.sampled_from(sorted(self.model.groups)), min_size=1, unique=True))
        new = dict.fromkeys(names, 5.0) | {names[-1]: bad}
        with pytest.raises(StoreError, match=f"of group {names[-1]} is not in"):
            self.call(self.store.replay.reweigh(self.team.trainer, new))

    @rule(factor=st.sampled_from([2.0**-16, 0.5, 1e-3]), again=twice)
    def rescale(self, factor: float, again: bool) -> None:
        self.calls(lambda: self.store.replay.rescale(self.team.leader, self.base, self.base + 16, factor), again)
        self.base += 16
        if self.model.weighted:
            self.model.rescale(factor)

    @rule(again=twice, checkpoint=st.booleans())
    def train(self, again: bool, checkpoint: bool) -> None:
        """Let the trainer and the fleet catch up."""
        self.catch_up(again, checkpoint)

    def catch_up(self, again: bool, checkpoint: bool) -> None:
        state = self.call(self.store.run.state())
        for step in range(state.committed_step + 1, state.prepared_step + 1):
            self.calls(lambda step=step: self.store.steps.commit(self.team.trainer, step), again)
        self.version = state.prepared_step + 1
        self.calls(lambda: self.store.steps.publish(self.team.trainer, self.version), again)
        if checkpoint and self.version:
            self.call(self.store.steps.checkpointed(self.team.trainer, state.prepared_step))
            self.calls(self.store.steps.retire, again)
            self.model.retire(self.version)
            self.check_keys()

    @rule()
    def change_leader(self) -> None:
        self.call(self.store.run.step_down(f"leader-{len(self.leaders) - 1}:boot"))
        self.leaders.append(self.call(self.store.run.lead(f"leader-{len(self.leaders)}:boot", 60.0)))
        self.team = flow.Team(self.leaders[-1], self.trainers[-1])

    @rule()
    def change_trainer(self) -> None:
        self.trainers.append(self.call(self.store.run.attach_trainer()))
        self.team = flow.Team(self.leaders[-1], self.trainers[-1])

    @precondition(lambda self: len(self.leaders) > 1)
    @rule(data=st.data())
    def superseded_leader(self, data: st.DataObject) -> None:
        """Make calls as a superseded leader."""
        fence = data.draw(st.sampled_from(self.leaders[:-1]))
        items = self.call(self.store.replay.read_headers(self.team.leader, 3))
        drawn = sorted(self.model.groups)[:1]
        for late in (
            self.store.replay.settle(fence, [Settlement(item, "insert") for item in items]),
            self.store.replay.sweep_and_peek(fence, self.version + 1, 3),
            self.store.steps.prepare(fence, *flow.plan(len(self.model.steps), drawn), 0, [1.0] * len(drawn)),
            self.store.replay.rescale(fence, self.base, self.base + 1, 0.5),
        ):
            with pytest.raises(Fenced):
                self.call(late)

    @precondition(lambda self: len(self.trainers) > 1 and self.model.groups)
    @rule(data=st.data())
    def superseded_trainer(self, data: st.DataObject) -> None:
        fence = data.draw(st.sampled_from(self.trainers[:-1]))
        for late in (
            self.store.replay.reweigh(fence, {min(self.model.groups): 9.0}),
            self.store.steps.commit(fence, len(self.model.steps)),
        ):
            with pytest.raises(Fenced):
                self.call(late)

    @invariant()
    def same_as_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        table = self.call(tables.read(self.store))
        tables.check(table, self.model.capacity, self.sampler, self.model.remover)
        self.model.check(table)
        report = assess("machine", table.audit)
        assert report.ok, report.messages
        assert report.slots_used >= len(self.waiting)

    def check_keys(self) -> None:
        """Check that only known keys exist, with exactly the groups and payloads that are still needed."""
        prefix = f"{self.store.keys.prefix}:"

        async def scan() -> list[str]:
            pattern = prefix.replace("{", "[{]").replace("}", "[}]") + "*"
            return [key.decode().removeprefix(prefix) async for key in self.store.client.scan_iter(pattern, count=1000)]

        found = self.call(scan())
        assert [name for name in found if not re.fullmatch(KEYS, name)] == []
        assert {name[6:] for name in found if name.startswith("group:")} == self.model.kept()
        payloads = {name[8:].split(".")[0] for name in found if name.startswith("payload:")}
        assert payloads == self.model.kept() | set(self.waiting)

    def teardown(self) -> None:
        """Settle what is left, train and cover every step by a checkpoint; check that only counters remain."""
        if not hasattr(self, "model"):
            return
        items = self.call(self.store.replay.read_headers(self.team.leader, 1000))
        self.call(self.store.replay.settle(self.team.leader, [Settlement(item, "filtered:zero") for item in items]))
        self.model.drops |= dict.fromkeys(self.waiting, "filtered:zero")
        self.waiting = {}
        while self.model.groups if self.model.max_uses else any(not group.uses for group in self.model.groups.values()):
            drawn = self.call(tables.draw(self.store, self.team, len(self.model.groups)))
            self.model.prepare(drawn, [1.0] * len(drawn))
        if not self.model.max_uses:
            self.call(self.store.replay.sweep_and_peek(self.team.leader, self.version + 1, 1))
            self.model.sweep(self.version + 1)
        self.catch_up(False, True)
        self.same_as_the_model()
        self.check_keys()
        self.call(self.store.restores.delete_run())


def run_machine(server: RedisServer, sampler: str) -> None:
    with asyncio.Runner() as runner:
        store = runner.run(Store.connect(server.url, "unused", server.password))
        machine = type("Machine", (TableMachine,), {"runner": runner, "store": store, "sampler": sampler})
        quick = settings(
            max_examples=12, stateful_step_count=30, deadline=None, database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
            phases=[Phase.generate],  # shrinking a failure takes minutes
            report_multiple_bugs=False,
        )  # fmt: skip
        try:
            run_state_machine_as_test(machine, settings=quick)
        finally:
            runner.run(_leave(store))


async def _leave(store: Store) -> None:
    await store.client.flushall()
    await store.close()
    await asyncio.sleep(0)  # the loop closes sockets in its next iteration


@pytest.mark.parametrize("sampler", [sampler for sampler in tables.SAMPLERS if sampler != "prioritized"])
def test_the_table_matches_the_model(server: RedisServer, sampler: str) -> None:
    run_machine(server, sampler)


def test_a_prioritized_table_matches_the_model(server: RedisServer) -> None:
    run_machine(server, "prioritized")
