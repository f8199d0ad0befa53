"""Conservation under a random walk: whatever generators, leaders and trainers do, in any order, late, twice or not at all,
every issued ticket is in exactly one place or outcome, slots are held by exactly the tickets on their way, and a run that
ended and was checkpointed leaves a handful of keys.
"""

from __future__ import annotations

import contextlib
import random
import re

import pytest

from services.console.audit import assess
from services.protocol.errors import Fenced, OutOfOrder
from services.protocol.store import Claim, RunState, Settlement, Store
from tests.harness import ticket
from tests.protocol import flow

OPERATIONS = 300
SLOTS = 12
CAPACITY = 6
PATTERNS = (
    r"run|ledger|tickets|headers|outstanding|claims|attempts|expiries|deadletter|departed|replay:(order|version|used)",
    r"trained:\d+|step:\d+|group:\d+-\d+|partial:\d+-\d+|payload:\d+-\d+\.\d+",
)
LEFT_AT_THE_END = r"run|ledger|tickets|headers|deadletter|trained:\d+"


class Walk:
    """Everybody who may call the store, with what they believe."""

    def __init__(self, store: Store, seed: int, max_uses: int) -> None:
        self.store, self.random, self.max_uses = store, random.Random(seed), max_uses
        self.held: list[tuple[str, Claim]] = []  # claims somebody once had, lost ones included
        self.leaders: list[int] = []  # fencing numbers, the last is the valid one
        self.trainers: list[int] = []
        self.operations = [
            *[self.issue] * 3, *[self.claim] * 4, *[self.submit] * 8, *[self.settle] * 4, *[self.prepare] * 3, *[self.commit] * 3,
            *[self.publish] * 3, self.sweep, self.renew, self.release, self.fail, self.save_partial, self.corrupt, self.pause,
            self.checkpoint, self.change_leader, self.change_trainer,
        ]  # fmt: skip

    async def begin(self) -> None:
        await self.store.create("config", "dataset", 1000, SLOTS)
        await self.change_leader()
        await self.change_trainer()
        await self.store.publish(self.trainers[-1], 0)

    async def step(self) -> str:
        """One operation, sometimes twice, as after a lost reply; sometimes by one who was superseded."""
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
        state = await self.store.state()
        assert state is not None
        return state

    async def issue(self) -> None:
        cursor = (await self.state()).cursor
        tickets = [ticket(seq) for seq in range(cursor, cursor + self.random.randint(1, 6))]
        fence = self.fence(self.leaders)
        for _ in self.twice():
            await self.store.issue(fence, cursor, tickets)

    async def claim(self) -> None:
        consumer, lease_s = f"g{self.random.randrange(3)}", self.random.choice([0.0, 60.0, 60.0])
        version = (await self.state()).published_version
        for _ in self.twice():
            _, claims = await self.store.claim(
                consumer, version, lease_s, self.random.randint(1, 4), "0-0", self.random.random() < 0.2, max_expiries=3
            )
            self.held += [(consumer, claim) for claim in claims]

    async def renew(self) -> None:
        if one := self.anybody():
            await self.store.renew(one[0], [claim for consumer, claim in self.held[-10:] if consumer == one[0]])

    async def release(self) -> None:
        if one := self.anybody():
            for _ in self.twice():
                await self.store.release(*one)

    async def fail(self) -> None:
        if one := self.anybody():
            for _ in self.twice():
                await self.store.fail(*one, "a random failure", max_attempts=3)

    async def submit(self) -> None:
        one = self.anybody()
        if one and one[1].ticket is not None:
            for _ in self.twice():
                await flow.submit(self.store, *one)

    async def save_partial(self) -> None:
        if one := self.anybody():
            await self.store.save_partial(*one, b"tokens", flow.TTL_S)

    async def corrupt(self) -> None:
        """A submission whose header is damaged."""
        one = self.anybody()
        if one and one[1].ticket is not None:
            bad = flow.header(one[1], ticket="no such ticket")
            await self.store.submit(*one, bad, flow.payload_bytes(one[1]), flow.TTL_S)

    async def settle(self) -> None:
        fence = self.fence(self.leaders)
        items = await self.store.read_headers(fence, self.random.randint(1, 6))
        actions = [self.random.choice(["insert"] * 6 + ["stale", "filtered:zero_std", "filtered:solved"]) for _ in items]
        settlements = [
            Settlement(item, action, item.header.seq, 0) if item.header else Settlement(item, "failed:corrupt")
            for item, action in zip(items, actions, strict=True)
        ]
        for _ in self.twice():
            await self.store.settle(fence, settlements, CAPACITY)

    async def prepare(self) -> None:
        table = [group.group for group in await self.store.oldest_groups(CAPACITY)]
        drawn = table[: self.random.randint(1, 3)]
        stale = [name for name in table[len(drawn) :] if self.random.random() < 0.1]
        step, fence = (await self.state()).prepared_step + 1, self.fence(self.leaders)
        if drawn:
            for _ in self.twice():
                await self.store.prepare(fence, *flow.plan(step, drawn), stale, self.max_uses)

    async def sweep(self) -> None:
        table = [group.group for group in await self.store.oldest_groups(CAPACITY)]
        fence = self.fence(self.leaders)
        for _ in self.twice():
            await self.store.sweep(fence, [name for name in table if name.endswith("3")])

    async def commit(self) -> None:
        step = (await self.state()).committed_step + self.random.choice([0, 1, 1, 1, 2])
        for _ in self.twice():
            await self.store.commit(self.fence(self.trainers), step)

    async def publish(self) -> None:
        version = (await self.state()).committed_step + self.random.choice([0, 1, 1, 1, 2])
        for _ in self.twice():
            await self.store.publish(self.fence(self.trainers), version)

    async def checkpoint(self) -> None:
        await self.store.checkpointed(self.fence(self.trainers), (await self.state()).committed_step)
        await self.store.retire()

    async def change_leader(self) -> None:
        await self.store.step_down(f"l{len(self.leaders)}")
        fence = await self.store.lead(f"l{len(self.leaders) + 1}", 60.0)
        assert fence is not None
        self.leaders.append(fence)

    async def change_trainer(self) -> None:
        self.trainers.append(await self.store.attach_trainer())

    async def pause(self) -> None:
        await self.store.pause("generator", "a random pause")
        assert await flow.claim(self.store, "g0", version=(await self.state()).published_version) == []
        await self.store.resume("generator")

    async def wind_up(self) -> None:
        """Everything still under way comes to its end, as it would in a run."""
        version = (await self.state()).published_version
        while (await self.store.audit())["tickets"]:
            for claim in await flow.claim(self.store, "last", 20, version, lease_s=0.0, max_expiries=100):
                assert await flow.submit(self.store, "last", claim)
        while items := await self.store.read_headers(self.leaders[-1], 100):
            settlements = [Settlement(item, "filtered:solved") for item in items]
            await self.store.settle(self.leaders[-1], settlements, CAPACITY)
        while table := [group.group for group in await self.store.oldest_groups(CAPACITY)]:
            step = (await self.state()).prepared_step + 1
            await self.store.prepare(self.leaders[-1], *flow.plan(step, table[:2]), table[3:], self.max_uses)
        state = await self.state()
        for step in range(state.committed_step + 1, state.prepared_step + 1):
            assert await self.store.commit(self.trainers[-1], step)
        await self.store.publish(self.trainers[-1], state.prepared_step + 1)
        await self.store.checkpointed(self.trainers[-1], state.prepared_step)
        await self.store.retire()


async def names(store: Store) -> set[str]:
    """Keys of the run without their prefix."""
    return {key.decode().removeprefix(store.keys.prefix + ":") async for key in store.client.scan_iter()}


async def check_keys(store: Store) -> None:
    """Known names only; every payload is awaited by a header or a group, or expires; every group is in the table or a plan."""
    present = await names(store)
    assert [name for name in present if not any(re.fullmatch(pattern, name) for pattern in PATTERNS)] == []
    groups = {name.removeprefix("group:") for name in present if name.startswith("group:")}
    at_work = {group.group for group in await store.oldest_groups(1000)}
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


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_is_lost_or_doubled_whatever_happens(any_store: Store, seed: int) -> None:
    walk = Walk(any_store, seed, max_uses=1 + seed % 2)
    await walk.begin()
    done: list[str] = []
    for i in range(OPERATIONS):
        done.append(await walk.step())
        report = assess("walk", await any_store.audit())
        assert report.ok, (report.messages, done[-5:])
        assert report.slots_used <= SLOTS
        assert report.places["buffered"] <= CAPACITY
        if i % 25 == 0:
            await check_keys(any_store)
    assert report.outcomes["trained"] > 0
    assert report.issued > 2 * SLOTS, "the walk got somewhere"
    await walk.wind_up()
    report = assess("walk", await any_store.audit())
    assert report.ok, report.messages
    assert sum(report.places.values()) == report.slots_used == 0
    await check_keys(any_store)
    assert {name for name in await names(any_store) if not re.fullmatch(LEFT_AT_THE_END, name)} == set()
    trained = await any_store.client.bitcount(any_store.keys.trained(0))
    assert trained == report.outcomes["trained"], "each dataset row was trained once"
