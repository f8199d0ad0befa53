"""Copies dataprep's state into a file (functions/snapshot.lua, store/snapshot_format.py).

Guarantees: a copy is of one instant, or it is restarted; no command handles more than a few hundred groups, so the server
stays responsive.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from services.protocol.errors import StoreError
from services.store.batching import pieces
from services.store.facet import TOGETHER, Facet, named, ordinal
from services.store.snapshot_format import CLOCKS, LAYOUT, Groups, Head, Letters, Rows, SnapshotGroup, Writer, clock_key

LEASE_S = 10.0  # the leader resumes this long after the copying process has died
HOLD_S = 2.0  # how often the copying process renews the hold
PAYLOADS_TOGETHER = 64  # of some 40 KB, up to ten times that
ATTEMPTS = 5
ROWS = ("rates", "drops")


class SnapshotWriter(Facet):
    """Writes snapshots of a run."""

    async def save(self, fence: int, step: int, path: Path, payloads: bool) -> None:
        """Write a snapshot of the run after `step`, with the tokens of all groups if `payloads`. Raises `StoreError`, `OSError`.

        The leader is paused meanwhile: some 35 µs per group, with payloads some 110 µs.
        """
        for _ in range(ATTEMPTS):
            token = ordinal()
            found = await self._redis.call("snapshot_begin", fence, token, int(1000 * LEASE_S))
            try:
                committed = int(_texts(found[0])["committed_step"])
                if committed != step:
                    raise StoreError(f"Redis has committed step {committed}, but the weights are those after step {step}")
                held = await self._copy(fence, token, found, path, payloads)
            finally:
                held_to_the_end = bool(await self._redis.call("snapshot_end", fence, token))
            if held and held_to_the_end:
                return
        raise StoreError(f"snapshot failed {ATTEMPTS} times: its {LEASE_S:g} s lease was not renewed in time")

    async def _copy(self, fence: int, token: int, found: Any, path: Path, payloads: bool) -> bool:
        """Copy what `snapshot_begin` found and the rest. Returns False if the leader resumed meanwhile or the server restarted,
        which invalidates the cursor of a scan.
        """
        server = await self._server()
        held = time.monotonic()
        head = await self._head(found, payloads)
        writer = Writer(path)
        try:
            await asyncio.to_thread(writer.add, head)
            last_letter = found[4].decode()
            async for piece in self._pieces(head, last_letter):
                await asyncio.to_thread(writer.add, piece)
                if time.monotonic() - held < HOLD_S:
                    continue
                held = time.monotonic()
                if not await self._redis.call("snapshot_hold", fence, token, int(1000 * LEASE_S)):
                    return False
        finally:
            await asyncio.to_thread(writer.close)
        return await self._server() == server

    async def _server(self) -> str:
        """Return the id of the server's process."""
        return (await self._redis.info("server"))["run_id"]

    async def _head(self, found: Any, payloads: bool) -> Head:
        run, ledger = _texts(found[0]), _texts(found[1])
        committed, prepared = int(run["committed_step"]), int(run["prepared_step"])
        epochs, steps = range(int(run["last_epoch"]) + 1), range(committed + 1, prepared + 1)
        order, table = await self._redis.send(("HGETALL", self._keys.order), ("HGETALL", self._keys.replay_state))
        gaps, departed = await self._redis.send(
            ("ZRANGE", self._keys.replay_gaps, 0, -1, "WITHSCORES"), ("LRANGE", self._keys.departed, 0, -1)
        )
        trained = await self._redis.send(*[("GET", self._keys.trained(epoch)) for epoch in epochs]) if epochs else []
        plans = await self._redis.send(*[("HGETALL", self._keys.step(step)) for step in steps]) if steps else []
        needed = {step: named(plan) for step, plan in zip(steps, plans, strict=True)}
        drawn = {name for plan in needed.values() for name in plan["groups"].split()}
        return Head(
            layout=LAYOUT,
            step=committed,
            run=run,
            ledger={name: int(count) for name, count in ledger.items()},
            outstanding=_scores(found[2]),
            requeued=[name.decode() for name in found[3]],
            evaluating=bool(found[5]),
            order=named(order),
            table=_texts(table),
            gaps=_scores(gaps),
            trained={epoch: bits for epoch, bits in zip(epochs, trained, strict=True) if bits},
            plans=needed,
            departed=[name.decode() for name in departed if name in drawn],
            whole=payloads,
        )

    async def _pieces(self, head: Head, last_letter: str) -> AsyncIterator[Groups | Rows | Letters]:
        async for names in self._names(head):
            yield Groups(await self._groups(names, head.whole))
        for key in ROWS:
            async for fields in self._scan(f"{self._keys.prefix}:{key}"):
                yield Rows(key, fields)
        if last_letter:
            async for entries in self._pages(self._keys.deadletter, last=last_letter):
                yield Letters([(entry.decode(), {k.decode(): v for k, v in fields.items()}) for entry, fields in entries])

    async def _names(self, head: Head) -> AsyncIterator[Sequence[str]]:
        """Yield groups of the table in issue order, then those of prepared steps that have left it."""
        together = PAYLOADS_TOGETHER if head.whole else TOGETHER
        first, seen = 0, set[str]()
        planned = {
            name.decode() for plan in head.plans.values() for field in ("groups", "departed") for name in plan[field].split()
        }
        while found := await self._redis.ask(self._redis.client.zrange(self._keys.replay_order, first, first + together - 1)):
            names = [name.decode() for name in found]
            seen |= planned.intersection(names)
            first += len(names)
            yield names
        for names in pieces(sorted(planned - seen), together):
            yield names

    async def _groups(self, names: Sequence[str], whole: bool) -> list[SnapshotGroup]:
        keys = self._keys
        scored = (keys.replay_version, keys.replay_weight, keys.replay_idle, *(clock_key(keys, number) for number in CLOCKS))
        scores = await self._redis.send(*[("ZMSCORE", key, *names) for key in scored])
        if whole:
            fields = [named(found) for found in await self._redis.send(*[("HGETALL", keys.group(name)) for name in names])]
        else:
            counted = await self._redis.send(*[("HMGET", keys.group(name), "seq", "uses") for name in names])
            fields = [{"seq": seq, "uses": uses} if uses else {} for seq, uses in counted]
        present = [i for i in range(len(names)) if fields[i]]
        payloads: dict[int, bytes | None] = {}
        if whole and present:
            bodies = await self._payloads.sealed([fields[i]["payload"].decode() for i in present])
            payloads = dict(zip(present, bodies, strict=True))
        return [
            SnapshotGroup(names[i], int(fields[i]["seq"]), fields[i], payloads.get(i), *_scores_of([each[i] for each in scores]))
            for i in present
        ]

    async def _scan(self, key: str) -> AsyncIterator[dict[str, bytes]]:
        cursor = 0
        while True:
            cursor, found = await self._redis.ask(self._redis.client.hscan(key, cursor, count=TOGETHER))
            if found:
                yield {name.decode(): value for name, value in found.items()}
            if cursor == 0:
                return


def _scores_of(found: Sequence[Any]) -> tuple[float | None, ...]:
    """Return version, weight, clock and idle of a group; it is in at most one of the sets of clocks."""
    version, weight, idle, *clocks = (None if score is None else float(score) for score in found)
    return version, weight, next((rings for rings in clocks if rings is not None), None), idle


def _texts(flat: list[bytes]) -> dict[str, str]:
    return {name: value.decode() for name, value in named(flat).items()}


def _scores(flat: list[bytes]) -> dict[str, int]:
    return {name: int(float(score)) for name, score in named(flat).items()}
