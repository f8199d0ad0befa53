"""Functions are atomic: whatever their arguments, they fail before the first write or not at all."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from services.console.run.redis_server import RedisServer
from services.protocol.errors import StoreError
from services.store import Store
from services.store.connection import Connection
from services.store.functions.footprint import footprints
from services.store.records import TableRules
from tests.repeats.repeater import called
from tests.repeats.whole_run import ACTORS, WholeRun
from tests.support import flow

WRONG = (b"", b"x", b"-1", b"0", b"2", b"nan", b"-inf", b"1e400", b"0.5", b"9007199254740993", b"99999999999999999999", b"1-1")
"""Replacements for an argument: each is invalid for some kinds of argument and valid for others."""
MOST = 30  # number of leading arguments of a call that are replaced
EACH = 1  # number of calls of each function that are varied
SAVE = """
local saved = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  saved[#saved + 1] = {key, redis.call('DUMP', key), math.max(redis.call('PTTL', key), 0)}
end
return saved
"""
PUT_BACK = """
for _, key in ipairs(redis.call('KEYS', '*')) do redis.call('DEL', key) end
for i = 1, #ARGV, 3 do redis.call('RESTORE', ARGV[i], ARGV[i + 2], ARGV[i + 1]) end
"""


class Fuzzer(Connection):
    """A connection that sends variants of a call with wrong arguments first, undoes their effects, and then sends the call."""

    seen: Counter[str]
    refused: Counter[str]
    halves: list[str]

    async def send(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Send commands, each function call preceded by variants of it."""
        for at, command in enumerate(commands):
            if (name := called(command)) and self.seen[name] < EACH:
                self.seen[name] += 1
                for variant in variants(command, self.seen[name]):
                    await self._try(name, (*commands[:at], variant))
        return await super().send(*commands)

    async def _try(self, name: str, commands: tuple[tuple[Any, ...], ...]) -> None:
        await super().send(*commands[:-1])
        before = await self._saved()
        try:
            await super().send(commands[-1])
        except StoreError as error:
            self.refused[name] += 1
            if differing := [key for key, body in (await self._saved()).items() ^ before.items()]:
                self.halves.append(f"{name}{commands[-1][4:]}"[:300] + f" changed {differing}, and then: {error}")
            if not differing:
                return
        saved = [part for key, (body, ttl_ms) in before.items() for part in (key, body, ttl_ms)]
        await self.client.eval(PUT_BACK, 0, *saved)  # type: ignore[misc]

    async def _saved(self) -> dict[bytes, Any]:
        return {key: Body(body, ttl_ms) for key, body, ttl_ms in await self.client.eval(SAVE, 0)}  # type: ignore[misc]


class Body(tuple[bytes, int]):
    """A key's value and its time to live, which may only decrease."""

    def __new__(cls, body: bytes, ttl_ms: int) -> Body:
        return super().__new__(cls, (body, ttl_ms))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Body) and self[0] == other[0]

    def __hash__(self) -> int:
        return hash(self[0])


def variants(command: tuple[Any, ...], seed: int) -> list[tuple[Any, ...]]:
    """Return variants of a call: each with one argument replaced, one missing or one too many."""
    head, args, dice = command[:4], list(command[4:]), random.Random(seed)
    found = [(*head, *args, b"more"), (*head, *args[:-1]), head] if args else [(*head, b"more")]
    for place in range(min(len(args), MOST)):
        found += [(*head, *args[:place], wrong, *args[place + 1 :]) for wrong in dice.sample(WRONG, 5)]
    return found


@pytest.mark.slow
async def test_every_function_fails_before_its_first_write(server: RedisServer, tmp_path: Path) -> None:
    seen, refused, halves = Counter[str](), Counter[str](), list[str]()
    stores = dict[str, Store]()
    for actor in ACTORS:
        connection = await Fuzzer.connect(server.url, "fuzzed", server.password)
        connection.seen, connection.refused, connection.halves = seen, refused, halves
        stores[actor] = Store(connection)
    try:
        await WholeRun(stores, tmp_path).run()
    finally:
        await stores["console"].restores.delete_run()
        for store in stores.values():
            await store.close()
    assert not halves, "\n".join(halves)
    assert seen.keys() == footprints().keys()
    assert refused.keys() == footprints().keys(), "every function rejects some arguments"


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        (TableRules(capacity=0), 'capacity: "0" is not a whole number, 1 or more'),
        (TableRules(remover="random"), 'remover: "random" is not a remover'),
        (TableRules(sampler="random"), 'sampler: "random" is not a sampler'),
        (TableRules(max_uses=-1), 'max uses: "-1" is not a whole number, 0 or more'),
    ],
)
async def test_a_table_with_invalid_rules_is_not_created(any_store: Store, rules: TableRules, why: str) -> None:
    with pytest.raises(StoreError, match=why):
        await any_store.run.create("config", "dataset", 10, 4, rules)
    assert await any_store.run.state() is None


@pytest.mark.parametrize("variate", ["nan", "inf", "0", "-1", "x"])
async def test_an_invalid_variate_is_rejected_and_loses_no_group(any_store: Store, variate: str) -> None:
    team = await flow.start(any_store, table=TableRules("prioritized"))
    await flow.buffer(any_store, team, 2)
    args = [team.leader, 0, 0, "0-0 0-1", f"1.0 {variate}", -1, b"plan"]
    with pytest.raises(StoreError, match=f"variate {variate} is not a finite number above 0"):
        await any_store.connection.call("prepare", *args)
    await flow.prepare(any_store, team, 0, ["0-0", "0-1"])


async def test_a_claim_of_zero_tickets_gets_none(any_store: Store) -> None:
    """Stream commands would interpret a count of 0 as all."""
    team = await flow.start(any_store)
    await flow.issue(any_store, team, 3)
    assert await flow.claim(any_store, "g", 0) == []
    assert await flow.claim(any_store, "g", 0, adopt=True, lease_s=0.0) == []
    assert len(await flow.claim(any_store, "g", 3)) == 3
    assert await flow.claim(any_store, "g", 0, adopt=True, lease_s=0.0) == [], "instead of all that it holds"
