"""The stages of a group's life as one-line calls, for tests of the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from services.protocol import codec
from services.protocol.messages import Header, RankPlan, Sample, StepPlan
from services.protocol.payloads import Payload
from services.store import BufferedGroup, Claim, Settlement, Store
from services.store.records import TableRules
from services.store.tickets import Tickets, TurnPlace
from tests.support.harness import ticket

GROUP_SIZE = 4
TTL_S = 60


@dataclass(frozen=True)
class Team:
    """Fencing numbers of a leader and a trainer."""

    leader: int
    trainer: int


async def start(store: Store, slots: int = 8, steps: int = 100, version: int = 0, table: TableRules | None = None) -> Team:
    """Create a run, take its leadership, attach a trainer and publish the first version."""
    await store.run.create("config", "dataset", steps, slots, table)
    leader = await store.run.lead("leader-0:boot", 60.0)
    assert leader is not None
    team = Team(leader, await store.run.attach_trainer())
    if version == 0:
        await store.steps.publish(team.trainer, 0)
    return team


async def issue(store: Store, team: Team, count: int) -> int:
    """Issue the next `count` tickets of the run."""
    state = await store.run.state()
    assert state is not None
    return await store.tickets.issue(
        team.leader, state.cursor, [ticket(seq) for seq in range(state.cursor, state.cursor + count)]
    )


async def claim(
    store: Store, consumer: str, count: int = 1, version: int = 0, lease_s: float = 60.0, **options: Any
) -> list[Claim]:
    """Claim tickets."""
    return (await store.tickets.claim(consumer, version, await trainer_fence(store), lease_s, count, **options))[1]


def refuse_first_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the next claim come too late, as if another version had just been published."""
    claim, versions = Tickets.claim, list[int]()

    async def claimed(tickets: Tickets, consumer: str, version: int, *args: Any, **options: Any) -> tuple[str, list[Claim]]:
        versions.append(version)
        return await claim(tickets, consumer, version + 1 if len(versions) == 1 else version, *args, **options)

    monkeypatch.setattr(Tickets, "claim", claimed)


async def trainer_fence(store: Store) -> int:
    """Return the fence of the trainer that published the current weights."""
    state = await store.run.state()
    assert state is not None
    return state.published_by


def payload_bytes(claim: Claim) -> bytes:
    """Return a small payload, different for every claim."""
    lengths = np.full(GROUP_SIZE, 2, np.int32)
    tokens = np.full(2 * GROUP_SIZE, claim.fence % 1000, np.int32)
    spans = np.array([[i, 0, 0, 2] for i in range(GROUP_SIZE)], np.int32)
    return codec.encode(Payload(np.array([1, 2], np.int32), lengths, tokens, -np.ones(len(tokens), np.float32), spans))


def first_turn() -> TurnPlace:
    """Return the position of the first record of a ticket's first rollout."""
    return TurnPlace(0, 0, 0)


def header(claim: Claim, oldest: int = 0, **fields: Any) -> Header:
    """Return the header of a claimed ticket."""
    assert claim.ticket is not None
    given = {
        "ticket": claim.ticket_id, "seq": claim.ticket.seq, "epoch": claim.ticket.epoch, "index": claim.ticket.index,
        "payload": claim.payload, "payload_bytes": 100, "prompt_tokens": 2, "lengths": [2] * GROUP_SIZE,
        "rewards": [0.0, 1.0, 0.0, 1.0], "scores": {"exact": [0.0, 1.0, 0.0, 1.0]}, "truncated": [False] * GROUP_SIZE,
        "oldest": [oldest] * GROUP_SIZE, "newest": [oldest] * GROUP_SIZE, "generator": "g", "generate_s": 0.1, "score_s": 0.1,
        "source": "main", "tool_tokens": [0] * GROUP_SIZE,
    }  # fmt: skip
    return Header(**{**given, **fields})


async def submit(store: Store, consumer: str, claim: Claim, oldest: int = 0) -> bool:
    """Submit a finished group."""
    return await store.tickets.submit(consumer, claim, header(claim, oldest), payload_bytes(claim), TTL_S)


async def settle(store: Store, team: Team, action: str = "insert", count: int = 100) -> int:
    """Settle all headers with one action."""
    items = await store.replay.read_headers(team.leader, count)
    settlements = [
        Settlement(item, action, min(item.header.oldest))
        if item.header
        else Settlement(item, f"failed:corrupt header: {item.fault}")
        for item in items
    ]
    return await store.replay.settle(team.leader, settlements)


def plan(step: int, groups: Sequence[str], payloads: Sequence[str] = ()) -> tuple[StepPlan, list[RankPlan]]:
    """Return a plan with one row per group, all on one rank."""
    rows = [[Sample(name, 0, 1.0, 2)] for name in payloads]
    return StepPlan(step, list(groups), [], 1, len(rows), [len(rows)], [1.0], 2, 4, {}), [RankPlan(rows)]


async def prepare(store: Store, team: Team, step: int, groups: Sequence[str], oldest_fresh: int = 0) -> None:
    """Prepare a step of these groups."""
    await store.steps.prepare(team.leader, *plan(step, groups), oldest_fresh, [1.0] * len(groups))


async def buffer(store: Store, team: Team, count: int, oldest: int = 0) -> list[str]:
    """Insert `count` new groups into the replay table; return their names."""
    assert await issue(store, team, count) == count
    state = await store.run.state()
    assert state is not None
    claims = await claim(store, "g", count, state.published_version)
    assert len(claims) == count
    for one in claims:
        assert await submit(store, "g", one, oldest)
    assert await settle(store, team) == count
    return [one.ticket_id for one in claims]


async def counts(store: Store) -> dict[str, int]:
    """Return the nonzero counts of the audit."""
    return {name: count for name, count in (await store.run.audit()).items() if count}


async def oldest_groups(store: Store, count: int) -> list[BufferedGroup]:
    """Return the first `count` groups of the table in the order in which they were issued."""
    return await store.replay.groups([name.decode() for name in await store.client.zrange(store.keys.replay_order, 0, count - 1)])
