"""Arbitrary bytes in streams and payloads end as dead letters, and never stop a loop.

Run `pytest tests/runs/faults/test_stream_fuzz.py --entries 10000` for a long test; the default is 300 entries.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from services.console.run.redis_server import RedisServer
from services.dataprep.replay.settling import settle
from services.groups.records import unpack_partial
from services.protocol import codec
from services.protocol.errors import Damaged
from services.protocol.messages import Header, RankPlan, Sample, Ticket
from services.protocol.payloads import Payload
from services.store import Store
from services.trainer.step import batches
from tests.generator.test_pausing import pod
from tests.support import flow
from tests.support.harness import small_config, ticket, wait_until

BATCH = 50


@pytest.fixture
def entries(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--entries"))


def odd_value(rng: random.Random, depth: int = 0) -> object:
    """Return a random value that msgpack can encode."""
    plain = [
        None, True, -1, 2**63 - 1, -(2**63), float("nan"), float("inf"), -0.0, "", "\x00", "𝔘nicode", b"", rng.randbytes(9),
        1e308, rng.randrange(-5, 5), rng.random(), "0-0", ["i", [2**40], b""], ["f", [-1], b"\x00" * 4],
    ]  # fmt: skip
    if depth < 3 and rng.random() < 0.3:
        items = [odd_value(rng, depth + 1) for _ in range(rng.randrange(4))]
        return items if rng.random() < 0.5 else {str(i): item for i, item in enumerate(items)}
    return rng.choice(plain)


def mutated(rng: random.Random, message: object) -> bytes:
    """Return bytes similar to a message: truncated, with flipped bits, with another value in a field, or unrelated."""
    data = bytearray(codec.encode(message))
    match rng.randrange(5):
        case 0:
            return bytes(data[: rng.randrange(len(data))])
        case 1:
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            return bytes(data)
        case 2 | 3:
            tree = msgspec.msgpack.decode(bytes(data))
            place = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
            tree[place] = odd_value(rng)
            return msgspec.msgpack.encode(tree)
        case _:
            return rng.randbytes(rng.randrange(200))


async def test_arbitrary_headers_are_settled(store: Store, tmp_path: Path, entries: int) -> None:
    """The dataprep leader settles them."""
    config, rng = small_config(tmp_path), random.Random(1)
    team = await flow.start(store, slots=entries + BATCH)
    for first in range(0, entries, BATCH):
        assert await flow.issue(store, team, BATCH) == BATCH
        for claim in await flow.claim(store, "g", BATCH):
            good = flow.header(claim)
            assert await store.tickets.submit("g", claim, good, flow.payload_bytes(claim), 60)
        rows = await store.client.xrange(store.keys.headers)
        async with store.client.pipeline() as pipe:
            for entry, fields in rows:
                header = codec.decode(fields[b"body"], Header)
                pipe.xdel(store.keys.headers, entry)
                pipe.xadd(store.keys.headers, {**fields, b"body": mutated(rng, header)})
            await pipe.execute()
        items = await store.replay.read_headers(team.leader, BATCH)
        assert len(items) == BATCH
        assert await store.replay.settle(team.leader, [settle(item, 0, config) for item in items]) == BATCH
        counted = await store.run.audit()
        assert (counted["headers"], counted["outstanding"]) == (0, 0), "something was neither settled nor dead-lettered"
        assert (
            counted["buffered"]
            + counted.get("ledger:failed", 0)
            + counted.get("ledger:stale", 0)
            + sum(count for name, count in counted.items() if name.startswith("ledger:filtered"))
            >= first + BATCH
        )
    assert counted["ledger:failed"] > entries / 2


async def test_arbitrary_tickets_never_end_the_loop(tmp_path: Path, server: RedisServer, entries: int) -> None:
    """A generator claims them."""
    rng = random.Random(2)
    async with pod(tmp_path, server) as one:
        store, count = one.service.store, entries // 4
        for i in range(count):
            body = mutated(rng, ticket(i, answer="x", seed=0))
            fields = {"ticket": f"0-{i}", "body": body}
            await store.client.xadd(store.keys.tickets, fields)  # type: ignore[arg-type]
        one.service.notifications.notify("tickets")

        async def over() -> bool:
            return (await store.run.audit())["tickets"] == 0

        await wait_until(over, 150)
        assert not one.running.done(), "the generator's loop ended"
        assert all(loop.failures == 0 for loop in one.service.loops), "a loop failed"
        found = await store.run.audit()
        assert found.get("ledger:unknown_tickets", 0) + found["headers"] == count


async def test_arbitrary_payloads_are_damaged_or_trained(store: Store, entries: int) -> None:
    """A trainer rank reads them: each is either reported as damaged or has the planned rows."""
    rng, good = random.Random(4), codec.encode(payload())
    fine = 0
    for first in range(0, entries, BATCH):
        names = [f"0-{i}.1" for i in range(first, first + BATCH)]
        async with store.client.pipeline() as pipe:
            for name in names:  # damaged in Redis or by a generator
                data = mutated(rng, payload())
                pipe.set(store.keys.payload(name), codec.seal(data) if rng.random() < 0.7 else data or good)
            await pipe.execute()
        left = names
        while left:  # this would not terminate if other names were reported
            plan = RankPlan([[Sample(name, 0, 1.0, 2, tokens=4)] for name in left])
            try:
                rows = batches.build(plan, await store.steps.payloads(left), vocabulary=100, row_tokens=8)
            except Damaged as error:
                left = sorted(set(left) - error.reasons.keys())
            else:
                assert all(
                    len(row.targets) == 2 and 0 <= int(row.input_ids.min()) <= int(row.input_ids.max()) < 100 for row in rows
                )
                fine += len(rows)
                break
    assert 0 < fine < entries / 2, "some changes do not matter"


def payload() -> Payload:
    spans = np.array([[0, 0, 0, 2]], np.int32)
    tokens = np.array([3, 4], np.int32)
    return Payload(np.array([1, 2], np.int32), np.array([2], np.int32), tokens, np.zeros(2, np.float32), spans)


def test_arbitrary_messages_decode_or_are_rejected(entries: int) -> None:
    """Any bytes either decode as the expected type or are rejected; an unusable partial counts as none."""
    rng, good, given = random.Random(3), payload(), ticket(0)
    for _ in range(entries):
        data = mutated(rng, good)
        for kind in (Payload, Header, Ticket):
            try:
                codec.decode(data, kind)
            except codec.CorruptMessage:
                continue
        assert len(unpack_partial(data, given.group_size, 16)) == given.group_size


async def test_an_oversized_entry_is_rejected(store: Store) -> None:
    team = await flow.start(store)
    await flow.issue(store, team, 1)
    (claim,) = await flow.claim(store, "g", 1)
    huge = flow.header(claim, generator="g" * 2**20)
    with pytest.raises(ValueError, match="too large for a stream entry"):
        await store.tickets.submit("g", claim, huge, flow.payload_bytes(claim), 60)
    assert await store.client.xlen(store.keys.headers) == 0
    assert await store.tickets.fail("g", claim, "r" * 10**5, max_attempts=1)
    (letter,) = await store.dead_letters.page()
    assert len(letter.reason) == 4096
    await asyncio.sleep(0)
