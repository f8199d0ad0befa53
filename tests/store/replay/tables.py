"""Fill a replay table with groups of given weights, and read the whole table."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.store import Store
from services.store.functions import library
from services.store.records import Settlement, TableRules
from services.store.snapshot_format import CLOCKS, clock_of
from tests.support import flow

SAMPLERS = ("fifo", "lifo", "freshest", "uniform", "prioritized")
REMOVERS = ("fifo", "lowest_priority", "stalest")
MANY_SLOTS = 1_000_000
SHIFT = 2**32


@dataclass(frozen=True)
class Entry:
    """The values with which a group enters the table."""

    weight: float = 1.0
    variate: float = 1.0
    oldest: int = 0


@dataclass(frozen=True)
class Table:
    """The table as stored in Redis, with the groups that left it."""

    order: dict[str, float]
    version: dict[str, float]
    idle: dict[str, float]
    weight: dict[str, float]
    clock: dict[str, float]
    """Time until each clock rings."""
    clocks: dict[str, int]
    """The number of the set that each clock is in."""
    state: dict[str, str]
    drops: dict[str, str]
    departed: list[str]
    audit: dict[str, int]

    @property
    def uses(self) -> dict[int, int]:
        """Return the number of groups for each number of draws."""
        return {int(name[5:]): int(n) for name, n in self.state.items() if name.startswith("uses:")}


async def begin(store: Store, sampler: str, remover: str = "fifo", capacity: int = 100_000, max_uses: int = 0) -> flow.Team:
    """Start a run whose table has these settings."""
    return await flow.start(store, slots=MANY_SLOTS, table=TableRules(sampler, remover, capacity, max_uses))


async def arrive(store: Store, team: flow.Team, oldest: Sequence[int]) -> list[str]:
    """Submit a group for each of these oldest versions, without settling it; return their names."""
    assert await flow.issue(store, team, len(oldest)) == len(oldest)
    state = await store.run.state()
    assert state is not None
    claims = await flow.claim(store, "g", len(oldest), state.published_version)
    assert all(await asyncio.gather(*(flow.submit(store, "g", claim, old) for claim, old in zip(claims, oldest, strict=True))))
    return [claim.ticket_id for claim in claims]


async def settle(store: Store, team: flow.Team, entries: Sequence[Entry]) -> int:
    """Insert the unsettled groups with these entries, in the order of their tickets; return the number of groups."""
    items = sorted(
        await store.replay.read_headers(team.leader, len(entries)), key=lambda item: item.header.seq if item.header else -1
    )
    return await store.replay.settle(
        team.leader,
        [
            Settlement(item, "insert", min(item.header.oldest), entry.weight, entry.variate)
            for item, entry in zip(items, entries, strict=True)
            if item.header
        ],
    )


async def fill(store: Store, team: flow.Team, entries: Sequence[Entry]) -> list[str]:
    """Insert new groups; return their names."""
    names: list[str] = []
    for i in range(0, len(entries), 500):
        piece = entries[i : i + 500]
        names += await arrive(store, team, [entry.oldest for entry in piece])
        assert await settle(store, team, piece) == len(piece)
    return names


async def draw(store: Store, team: flow.Team, count: int, variates: Sequence[float] | None = None) -> list[str]:
    """Prepare the next step from the groups that the sampler draws; return their names."""
    drawn = [group for group, _ in (await store.replay.sweep_and_peek(team.leader, 0, count)).first]
    state = await store.run.state()
    assert state is not None
    await store.steps.prepare(team.leader, *flow.plan(state.prepared_step + 1, drawn), 0, variates or [1.0] * len(drawn))
    return drawn


async def read(store: Store) -> Table:
    """Read the whole table in one transaction."""
    async with store.client.pipeline(transaction=True) as pipe:
        for key in ("order", "version", "idle", "weight", *(f"clock:{number}" for number in CLOCKS)):
            pipe.zrange(f"{store.keys.prefix}:replay:{key}", 0, -1, withscores=True)
        pipe.hgetall(store.keys.replay_state)
        pipe.hgetall(store.keys.drops)
        pipe.lrange(f"{store.keys.prefix}:departed", 0, -1)
        pipe.fcall(f"{library()[0]}_audit", 1, store.keys.prefix)
        *sets, state, drops, departed, audit = await pipe.execute()
    scores: list[dict[str, float]] = [{name.decode(): score for name, score in pairs} for pairs in sets]
    rings, now = scores[4:], _texts(state)
    left = {
        name: ring - float(now[f"now:{number}"])
        for number, found in zip(CLOCKS, rings, strict=True)
        for name, ring in found.items()
    }
    return Table(
        *scores[:4],
        clock=left,
        clocks={name: number for number, found in zip(CLOCKS, rings, strict=True) for name in found},
        state=_texts(state),
        drops={ticket: text.split(" ")[1] for ticket, text in _texts(drops).items()},
        departed=[name.decode() for name in departed],
        audit={audit[i].decode(): int(audit[i + 1]) for i in range(0, len(audit), 2)},
    )


def _texts(raw: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in raw.items()}


def check(table: Table, capacity: int, sampler: str, remover: str) -> None:
    """Check the invariants of a table."""
    names = set(table.order)
    assert len(names) <= capacity
    assert set(table.version) == names
    assert {score % SHIFT for score in table.version.values()} == set(table.order.values())
    weighted, clocked = sampler == "prioritized" or remover == "lowest_priority", sampler in ("uniform", "prioritized")
    assert set(table.weight) == (names if weighted else set())
    assert not set(table.clock) & set(table.idle)
    assert set(table.clock) | set(table.idle) == (names if clocked else set())
    idle = {name for name, weight in table.weight.items() if weight == 0} if sampler == "prioritized" else set()
    assert set(table.idle) == idle
    idle_now = float(table.state.get("idle_now", 0))
    past = [name for name, left in table.clock.items() if left < -1e-12 * float(table.state[f"now:{table.clocks[name]}"])]
    assert not past, "a clock rang in the past"
    speeds = table.weight if sampler == "prioritized" else dict.fromkeys(table.clock, 1.0)
    assert table.clocks == {name: clock_of(speeds[name]) for name in table.clock}
    assert min(table.idle.values(), default=math.inf) >= idle_now
    total = math.fsum(table.weight.values())
    assert math.isclose(float(table.state.get("weight_sum", 0)), total, rel_tol=1e-9), (table.state, total)
    assert sum(table.uses.values()) == len(names)
    assert min(table.uses.values(), default=1) > 0


def chi_square_p(statistic: float, freedom: int) -> float:
    """Return P(X >= statistic) of a chi-square variable, by Wilson and Hilferty (1931): to 1e-3 from 10 degrees of freedom."""
    share = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - share)) / math.sqrt(share)
    return 0.5 * math.erfc(z / math.sqrt(2))


def plausible(p: float) -> bool:
    """Return whether p is neither suspiciously small nor suspiciously large."""
    return 0.001 < p < 0.999
