"""Conservation under a random walk. Whatever generators, leaders and trainers do, in any order, late, twice or not at all,
every issued ticket is in exactly one place or outcome, exactly the tickets on their way hold slots, and a run that has
ended and been checkpointed leaves only a handful of keys.
"""

from __future__ import annotations

import contextlib
import random
import re

import pytest

from services.operations.inspection.ledger import assess
from services.protocol.errors import Fenced, OutOfOrder
from services.store import Claim, RunState, Settlement, Store
from services.store.records import TableRules
from tests.support import flow
from tests.support.harness import ticket

OPERATIONS = 300
SLOTS = 12
CAPACITY = 6
PATTERNS = (
    r"run|answers|answers:order|order|ledger|tickets|tickets:rollouts|headers|outstanding|claims|claimed|attempts|expiries|deadletter|departed|requeued|requeued:letters|requeued:letters:order|reissue|drops|drops:order|samples:state|replay:(order|version|clock:\d|idle|weight|state|gaps)",
    r"trained:\d+|step:\d+|group:\d+-\d+|partial:\d+-\d+|payload:\d+-\d+\.\d+",
)
LEFT_AT_THE_END = (
    r"run|answers|answers:order|claimed|order|ledger|drops|drops:order|replay:(state|gaps)|"
    r"tickets|tickets:rollouts|headers|deadletter|trained:\d+"
)


class Walk:
    """All callers of a store, each with its own view of the run."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store, self.random = store, random.Random(seed)
        self.held: list[tuple[str, Claim]] = []  # all claims so far, including lost ones
        self.leaders: list[int] = []  # fencing numbers; the last one is valid
        self.trainers: list[int] = []
        self.operations = [
            *[self.issue] * 3, *[self.claim] * 4, *[self.submit] * 8, *[self.settle] * 4, *[self.prepare] * 3, *[self.commit] * 3,
            *[self.publish] * 3, self.sweep_and_peek, self.reweigh, self.renew, self.release, self.fail, self.save_partial,
            self.corrupt, self.pause, self.checkpoint, self.change_leader, self.change_trainer,
        ]  # fmt: skip

    async def begin(self) -> None:
        sampler = self.random.choice(["fifo", "lifo", "freshest", "uniform", "prioritized"])
        remover = self.random.choice(["fifo", "lowest_priority", "stalest"])
        table = TableRules(sampler, remover, CAPACITY, self.random.choice([1, 2, 3]))
        await self.store.run.create("config", "dataset", 1000, SLOTS, table)
        await self.change_leader()
        await self.change_trainer()
        await self.store.steps.publish(self.trainers[-1], 0)

    async def step(self) -> str:
        """Make a random call, which may be repeated or come from a superseded caller; return its name."""
        operation = self.random.choice(self.operations)
        with contextlib.suppress(OutOfOrder, Fenced):
            await operation()
        return operation.__name__

    def fence(self, fences: list[int]) -> int:
        return self.random.choice(fences) if self.random.random() < 0.1 else fences[-1]

    def twice(self) -> range:
        return range(1 + (self.random.random() < 0.3))

    def anybody(self) -> tuple[str, Claim] | None:
        return self.random.choice(self.held[-8:]) if self.held else None

    async def state(self) -> RunState:
        state = await self.store.run.state()
        assert state is not None
        return state

    async def issue(self) -> None:
        state = await self.state()
        cursor, free = state.cursor, state.slots - state.slots_used
        tickets = [ticket(seq) for seq in range(cursor, cursor + min(self.random.randint(1, 6), free + 1))]
        fence = self.fence(self.leaders)
        for _ in self.twice():
            await self.store.tickets.issue(fence, cursor, tickets)

    async def claim(self) -> None:
        consumer, lease_s = f"g{self.random.randrange(3)}", self.random.choice([0.0, 60.0, 60.0])
        state = await self.state()
        for _ in self.twice():
            _, claims = await self.store.tickets.claim(
                consumer, state.published_version, state.published_by, lease_s, self.random.randint(1, 4), "0-0",
                self.random.random() < 0.2, max_expiries=3,
            )  # fmt: skip
            self.held += [(consumer, claim) for claim in claims]

    async def renew(self) -> None:
        if one := self.anybody():
            await self.store.tickets.renew(one[0], [claim for consumer, claim in self.held[-10:] if consumer == one[0]])

    async def release(self) -> None:
        if one := self.anybody():
            for _ in self.twice():
                await self.store.tickets.release(*one)

    async def fail(self) -> None:
        if one := self.anybody():
            for _ in self.twice():
                await self.store.tickets.fail(*one, "a random failure", max_attempts=3)

    async def submit(self) -> None:
        one = self.anybody()
        if one and one[1].ticket is not None:
            for _ in self.twice():
                await flow.submit(self.store, *one)

    async def save_partial(self) -> None:
        if one := self.anybody():
            await self.store.tickets.save_partial(*one, b"tokens", flow.TTL_S)

    async def corrupt(self) -> None:
        """Submit a damaged header."""
        one = self.anybody()
        if one and one[1].ticket is not None:
            bad = flow.header(one[1], ticket="no such ticket")
            await self.store.tickets.submit(*one, bad, flow.payload_bytes(one[1]), flow.TTL_S)

    async def settle(self) -> None:
        fence = self.fence(self.leaders)
        items = await self.store.replay.read_headers(fence, self.random.randint(1, 6))
        actions = [self.random.choice(["insert"] * 6 + ["stale", "filtered:zero", "filtered:solved"]) for _ in items]
        settlements = [
            Settlement(item, action, 0, self.weight(), self.random.expovariate(1))
            if item.header
            else Settlement(item, "failed:corrupt")
            for item, action in zip(items, actions, strict=True)
        ]
        for _ in self.twice():
            await self.store.replay.settle(fence, settlements)

    def weight(self) -> float:
        return self.random.choice([0.0, 0.5, 1.0, 20.0])

    async def prepare(self) -> None:
        fence = self.fence(self.leaders)
        drawn = [group for group, _ in (await self.store.replay.sweep_and_peek(fence, 0, self.random.randint(1, 3))).first]
        if drawn and self.random.random() < 0.05:
            drawn = [*drawn[1:], "0-99999"]
        step, variates = (await self.state()).prepared_step + 1, [self.random.expovariate(1) for _ in drawn]
        if drawn:
            for _ in self.twice():
                await self.store.steps.prepare(fence, *flow.plan(step, drawn), 0, variates)

    async def sweep_and_peek(self) -> None:
        fence, oldest_fresh = self.fence(self.leaders), self.random.choice([0, 0, 1])
        for _ in self.twice():
            await self.store.replay.sweep_and_peek(fence, oldest_fresh, 3)

    async def reweigh(self) -> None:
        weights = {group.group: self.weight() for group in await flow.oldest_groups(self.store, 3)} | {"0-99999": 1.0}
        for _ in self.twice():
            await self.store.replay.reweigh(self.fence(self.trainers), weights)

    async def commit(self) -> None:
        step = (await self.state()).committed_step + self.random.choice([0, 1, 1, 1, 2])
        for _ in self.twice():
            await self.store.steps.commit(self.fence(self.trainers), step)

    async def publish(self) -> None:
        version = (await self.state()).committed_step + self.random.choice([0, 1, 1, 1, 2])
        for _ in self.twice():
            await self.store.steps.publish(self.fence(self.trainers), version)

    async def checkpoint(self) -> None:
        await self.store.steps.checkpointed(self.fence(self.trainers), (await self.state()).committed_step)
        await self.store.steps.retire()

    async def change_leader(self) -> None:
        await self.store.run.step_down(f"l{len(self.leaders)}")
        fence = await self.store.run.lead(f"l{len(self.leaders) + 1}", 60.0)
        assert fence is not None
        self.leaders.append(fence)

    async def change_trainer(self) -> None:
        self.trainers.append(await self.store.run.attach_trainer())

    async def pause(self) -> None:
        await self.store.run.pause("generator", "a random pause")
        assert await flow.claim(self.store, "g0", version=(await self.state()).published_version) == []
        await self.store.run.resume("generator")

    async def wind_up(self) -> None:
        """Finish everything in flight, as a run would at its end."""
        version = (await self.state()).published_version
        while (await self.store.run.audit())["tickets"]:
            for claim in await flow.claim(self.store, "last", 20, version, lease_s=0.0, max_expiries=100):
                assert await flow.submit(self.store, "last", claim)
        while items := await self.store.replay.read_headers(self.leaders[-1], 100):
            settlements = [Settlement(item, "filtered:solved") for item in items]
            await self.store.replay.settle(self.leaders[-1], settlements)
        leader = self.leaders[-1]
        while first := (await self.store.replay.sweep_and_peek(leader, 0, 2)).first:
            step = (await self.state()).prepared_step + 1
            await self.store.steps.prepare(leader, *flow.plan(step, [group for group, _ in first]), 0, [1.0] * len(first))
        state = await self.state()
        for step in range(state.committed_step + 1, state.prepared_step + 1):
            assert await self.store.steps.commit(self.trainers[-1], step)
        await self.store.steps.publish(self.trainers[-1], state.prepared_step + 1)
        await self.store.steps.checkpointed(self.trainers[-1], state.prepared_step)
        await self.store.steps.retire()


async def names(store: Store) -> set[str]:
    """Return the keys of the run, without their prefix."""
    return {key.decode().removeprefix(store.keys.prefix + ":") async for key in store.client.scan_iter()}


async def check_keys(store: Store) -> None:
    """Check that keys are known, that payloads have a header or group or expire, and that groups are in the table or a plan."""
    present = await names(store)
    assert [name for name in present if not any(re.fullmatch(pattern, name) for pattern in PATTERNS)] == []
    groups = {name.removeprefix("group:") for name in present if name.startswith("group:")}
    at_work = {group.group for group in await flow.oldest_groups(store, 1000)}
    at_work |= {name.decode() for name in await store.client.lrange(f"{store.keys.prefix}:departed", 0, -1)}  # type: ignore[misc]
    for name in present:
        if name.startswith("step:"):
            departed = await store.client.hget(f"{store.keys.prefix}:{name}", "departed")  # type: ignore[misc]
            at_work |= set((departed or b"").decode().split())
    assert groups == at_work
    awaited = {(await store.client.hget(store.keys.group(name), "payload") or b"").decode() for name in groups}  # type: ignore[misc]
    awaited |= {fields[b"payload"].decode() for _, fields in await store.client.xrange(store.keys.headers)}
    kept = {
        name.removeprefix("payload:")
        for name in present
        if name.startswith("payload:") and await store.client.ttl(f"{store.keys.prefix}:{name}") == -1
    }
    assert kept == awaited


@pytest.mark.parametrize("seed", range(8))
async def test_a_random_walk_conserves_tickets(store: Store, seed: int) -> None:
    walk = Walk(store, seed)
    await walk.begin()
    done: list[str] = []
    for i in range(OPERATIONS):
        done.append(await walk.step())
        report = assess("walk", await store.run.audit())
        assert report.ok, (report.messages, done[-5:])
        assert report.slots_used <= SLOTS
        assert report.places["buffered"] <= CAPACITY
        if i % 25 == 0:
            await check_keys(store)
    assert report.outcomes["trained"] > 0
    assert report.issued > SLOTS, "the walk made progress"
    await walk.wind_up()
    report = assess("walk", await store.run.audit())
    assert report.ok, report.messages
    assert sum(report.places.values()) == report.slots_used == 0
    await check_keys(store)
    assert {name for name in await names(store) if not re.fullmatch(LEFT_AT_THE_END, name)} == set()
    trained = await store.client.bitcount(store.keys.trained(0))
    assert trained == report.outcomes["trained"], "each dataset row was trained once"
