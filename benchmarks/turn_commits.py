"""Turn commits of many open rollouts through one Redis, against plain HSETs of the same bytes."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import quantiles

import numpy as np

from benchmarks.fleet import served_s
from services.console.run.redis_server import RedisServer
from services.environment.records import pack_record
from services.protocol.payloads import Turn
from services.store import Claim, Store
from services.store.tickets import TurnPlace
from tests.support import flow
from tests.support.harness import ticket

SAMPLES = 8  # rollouts per group
IN_FLIGHT = 64  # concurrent commits
TOGETHER = 64  # plain HSETs per request
POD = "environment-0"


def record(turn: int) -> bytes:
    """Return a turn of 200 tokens after a tool's result of 100, with its messages: 3.5 KB."""
    words = " ".join(f"word{i}" for i in range(100))
    return pack_record(
        Turn(
            segment=0, base=turn - 1, context=np.arange(100, dtype=np.int32), tokens=np.arange(200, dtype=np.int32),
            logprobs=np.full(200, -0.5, np.float32), spans=np.array([[7, 0, 200]], np.int32), finish="stop",
            messages=f'[{{"role": "tool", "content": "{words[:400]}"}}]', tools="",
            reply=f'{{"role": "assistant", "content": "{words}"}}',
        )
    )  # fmt: skip


async def commits(folder: Path, rollouts: int, turns: int) -> dict[str, list[float]]:
    """Commit `turns` turns to `rollouts` rollouts at random; return rates, latencies, and the CPU time of both sides."""
    await asyncio.to_thread(folder.mkdir)
    server = RedisServer(folder)
    await asyncio.to_thread(server.start)
    store = await Store.connect(server.url, "turns", server.password)
    try:
        claims = await _claimed(store, -(-rollouts // SAMPLES))
        open_rollouts = [(claim, sample) for claim in claims for sample in range(SAMPLES)]
        dice, done = random.Random(0), dict.fromkeys(range(len(open_rollouts)), 0)
        order = [dice.randrange(len(open_rollouts)) for _ in range(turns)]
        data = [record(turn) for turn in range(4)]
        for number in done:  # each has its first turn
            done[number] = 1
        await _at_once(len(open_rollouts), lambda i: _commit(store, *open_rollouts[i], 0, data[0]))
        places: list[int] = []
        for number in order:
            places.append(done[number])
            done[number] += 1
        waits: list[float] = []
        last: dict[int, asyncio.Event] = {}

        async def turn(i: int) -> None:
            before, mine = last.get(order[i]), asyncio.Event()
            last[order[i]] = mine
            if before is not None:  # turns of one rollout follow each other
                await before.wait()
            began = time.perf_counter()
            await _commit(store, *open_rollouts[order[i]], places[i], data[places[i] % len(data)])
            waits.append(time.perf_counter() - began)
            mine.set()

        seconds, client_s, server_s = await _measured(server, lambda: _at_once(turns, turn))
        batches = [
            [("HSET", f"plain:{order[i] // SAMPLES}", f"{order[i]}:{places[i]}", data[places[i] % len(data)]) for i in part]
            for part in (range(at, min(at + TOGETHER, turns)) for at in range(0, turns, TOGETHER))
        ]

        async def plain(i: int) -> None:
            await store.run._redis.send(*batches[i])

        plain_s, _, plain_server_s = await _measured(server, lambda: _at_once(len(batches), plain, 2))
    finally:
        await store.close()
        await asyncio.to_thread(server.stop)
    return {
        "turns_per_s": [turns / seconds],
        "turns_per_core_s": [turns / (client_s + server_s)],
        "turn_server_us": [1e6 * server_s / turns],
        "turn_client_us": [1e6 * client_s / turns],
        "turn_p99_ms": [1e3 * quantiles(waits, n=100)[98]],
        "turn_rate_of_plain": [plain_s / seconds],
        "turn_server_of_plain": [server_s / plain_server_s],
    }


async def _claimed(store: Store, count: int) -> list[Claim]:
    team = await flow.start(store, slots=count)
    tickets = [ticket(seq, group_size=SAMPLES) for seq in range(count)]
    assert await store.tickets.issue(team.leader, 0, tickets, b"", {}, 0, {"main"}) == count
    claims = await flow.claim(store, POD, count, lease_s=3600.0, rollouts=True)
    assert len(claims) == count
    return claims


async def _commit(store: Store, claim: Claim, sample: int, place: int, data: bytes) -> None:
    assert await store.tickets.commit_turn(POD, claim, TurnPlace(sample, 0, place), data, 3600)


async def _at_once(count: int, do: Callable[[int], Awaitable[None]], most: int = IN_FLIGHT) -> None:
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await do(number)

    await asyncio.gather(*(work() for _ in range(most)))


async def _measured(server: RedisServer, do: Callable[[], Awaitable[None]]) -> tuple[float, float, float]:
    """Return the wall seconds of `do`, and the CPU seconds of this process and of the server."""
    pid = server.pid
    assert pid is not None
    began, own, theirs = time.perf_counter(), time.process_time(), served_s(pid)
    await do()
    return time.perf_counter() - began, time.process_time() - own, served_s(pid) - theirs
