"""Restores a run to a snapshot (functions/snapshot.lua, store/snapshot_format.py), and deletes a run's keys.

Guarantees: only the restoring trainer changes the run meanwhile, and one that hung in a restore writes nothing afterwards, except
payloads in shards that nobody names; no command handles more than a few hundred groups; an interrupted restore is restarted from
the beginning; what an interrupted deletion leaves is not taken for a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from services.store.batching import pieces
from services.store.connection import Connection, facts
from services.store.facet import Facet
from services.store.payloads import restored_place
from services.store.snapshot_format import (
    Groups,
    Head,
    Letters,
    Restoration,
    Rows,
    Snapshot,
    SnapshotGroup,
    clock_key,
    clock_of,
    restoration,
)
from services.store.step_records import read_record

WORDS = 4000  # of commands in one call of a function, which Lua's stack must hold
KEPT = ("run", "defining", "fleet", "fleet:status", "sync", "metrics", "evaluations", "tickets", "tickets:rollouts", "headers",
        "answers", "answers:order", "samples", "samples:state")  # fmt: skip
"""Keys that a restore leaves in place: identity, fleet, numbers of sync rounds, history, answers to earlier calls, what the
sample log does not have yet; `restore_begin` empties the streams of work.
"""
Command = tuple[Any, ...]
Write = Callable[[Sequence[Command]], Awaitable[None]]
Delete = Callable[[Sequence[bytes]], Awaitable[Any]]


class RestoreWriter:
    """Writes while the trainer with this fence restores the run to `step`; each piece once, even if its reply is lost."""

    def __init__(self, connection: Connection, fence: int, step: int) -> None:
        self._redis, self._fence, self._step = connection, fence, step
        self._pieces = 0

    async def __call__(self, commands: Sequence[Command]) -> None:
        """Send commands. Raises `Fenced` or `OutOfOrder` if this trainer does not restore the run."""
        args: list[Any] = []
        for command in commands:
            args += (len(command), *command)
            if len(args) > WORDS:
                await self._send(args)
                args = []
        if args:
            await self._send(args)

    async def delete(self, keys: Sequence[bytes]) -> None:
        """Delete keys, even if the server is full. Raises the same errors."""
        await self._send(keys, "restore_delete")

    async def _send(self, args: Sequence[Any], function: str = "restore_write") -> None:
        self._pieces += 1
        await self._redis.call(function, self._fence, self._step, self._pieces, *args)


class Restores(Facet):
    """Restores a run to a snapshot."""

    async def restore(self, fence: int, snapshot: Snapshot, keep_plans: bool, alive: Callable[[], None]) -> str:
        """Restore the run to `snapshot`; its current state is lost. `alive` is called often. Returns which evaluation round was
        open in it and is abandoned, and why; or "".

        `keep_plans`: whether prepared steps can be trained as they were planned (see `snapshot_format.restoration`). Raises
        `Fenced`, `StoreError`, `SnapshotError`; the next trainer must then start it again.
        """
        head = snapshot.head
        await self._redis.call("restore_begin", fence, head.step)
        write = RestoreWriter(self._redis, fence, head.step)
        await self._delete_all_but(KEPT, write.delete)
        await self._payloads.sweep()  # frees memory for what is restored
        target = await asyncio.to_thread(_plan, snapshot, keep_plans)
        target, abandoned = await self._without_lost_round(target, head.step)
        rest = snapshot.pieces()
        while (piece := await asyncio.to_thread(next, rest, None)) is not None:
            alive()
            laid = dict[str, bytes]()
            if isinstance(piece, Groups) and target.whole and self._payloads.shards:
                piece, laid = _placed(piece, fence)
            await write(self._commands(piece, target))  # first: a sweep would delete payloads that the index does not name
            await self._payloads.lay(laid)
        await write(self._commands_of_head(head, target))
        await write([("ZADD", self._keys.requeued, place, name) for place, name in enumerate(head.requeued)])
        for departed in pieces(head.departed if target.whole else [], 1000):
            await write([("RPUSH", self._keys.departed, *departed)])
        await self._forget_after(self._keys.metrics, "step", head.step, write, alive)
        await self._forget_after(self._keys.evaluations, "eval/version", head.step + 1, write, alive)
        await self._redis.call("restore_end", fence, head.step, *_flat(target.fields))
        return abandoned

    async def _without_lost_round(self, target: Restoration, step: int) -> tuple[Restoration, str]:
        """Return what to restore with the end of the lost evaluation round, and why it is abandoned; "" if it was reported after
        the snapshot, or none was lost.
        """
        version, ledger = target.lost_round, dict(target.ledger)
        if version < 0:
            return target, ""
        reported = await self._has_entry(self._keys.evaluations, "eval/version", version)
        outcome = "evaluations" if reported else "evaluations_abandoned"
        ledger[outcome] = ledger.get(outcome, 0) + 1
        if reported:
            return replace(target, ledger=ledger), ""
        why = f"version {version}: the run was restored to step {step}, whose weights are newer"
        return replace(target, ledger=ledger, fields=target.fields | {"evaluation_abandoned": why}), why

    async def delete_run(self) -> None:
        """Delete every key of the run. Until all are gone, there is no run, and `create` refuses to make one."""
        await self._redis.send(("HDEL", self._keys.run, "protocol"))  # the rest of the hash goes last: it shows what remains
        await self._payloads.delete_all()
        await self._delete_all_but(("run",), lambda keys: self._redis.send(("UNLINK", *keys)))
        await self._redis.send(("UNLINK", self._keys.run))

    async def _delete_all_but(self, kept: Iterable[str], delete: Delete) -> None:
        names = {f"{self._keys.prefix}:{name}".encode() for name in kept}
        pattern = f"{self._keys.prefix.replace('{', '[{]').replace('}', '[}]')}:*"
        cursor, asked = 0, ""
        while True:
            _, info, (after, found) = await self._redis.send(
                self._redis.at_owner, ("INFO", "server"), ("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            )
            server = facts(info)["run_id"]
            if cursor and server != asked:  # another server, or one that restarted: the cursor is invalid there
                cursor = 0
                continue
            if gone := [key for key in found if key not in names]:
                await delete(gone)
            cursor, asked = int(after), server
            if not cursor:
                return

    def _commands(self, piece: Groups | Rows | Letters, target: Restoration) -> list[Command]:
        match piece:
            case Groups(groups):
                return [command for group in groups for command in self._put(group, target)] if target.whole else []
            case Letters(entries):
                return [("XADD", self._keys.deadletter, entry, *_flat(fields)) for entry, fields in entries]
            case Rows("rates", fields):
                return [("HSET", self._keys.rates, *_flat(fields))]
            case Rows(_, fields):  # drops were read a moment after the tickets: a ticket in progress was not dropped
                fields = {name: said for name, said in fields.items() if name not in target.reissue}
                times = [part for name, said in fields.items() for part in (said.split()[0], name)]
                drops = self._keys.drops
                return [("HSET", drops, *_flat(fields)), ("ZADD", f"{drops}:order", *times)] if fields else []

    def _put(self, group: SnapshotGroup, target: Restoration) -> list[tuple[Any, ...]]:
        keys = self._keys
        commands: list[tuple[Any, ...]] = [("HSET", keys.group(group.name), *_flat(group.fields))]
        if group.payload is not None:
            commands.append(("SET", keys.payload(group.fields["payload"].decode()), group.payload))
        if group.version is not None:
            commands.append(("ZADD", keys.replay_order, group.seq, group.name))
            speed = (group.weight or 0.0) if target.table["sampler"] == "prioritized" else 1.0
            clock = clock_key(keys, clock_of(speed or 1.0))
            scored = zip(
                (keys.replay_version, keys.replay_weight, clock, keys.replay_idle),
                (group.version, group.weight, group.clock, group.idle),
                strict=True,
            )
            commands += [("ZADD", key, repr(score), group.name) for key, score in scored if score is not None]
        return commands

    def _commands_of_head(self, head: Head, target: Restoration) -> list[Command]:
        keys = self._keys
        commands: list[Command] = [("HSET", keys.step(step), *_flat(plan)) for step, plan in target.plans.items()]
        commands += [("SET", keys.trained(epoch), bits) for epoch, bits in head.trained.items()]
        hashes = [(keys.order, head.order), (keys.replay_state, target.table), (keys.ledger, target.ledger)]
        commands += [("HSET", key, *_flat(fields)) for key, fields in hashes if fields]
        sets = ((keys.outstanding, target.reissue), (keys.reissue, target.reissue), (keys.replay_gaps, target.gaps))
        for key, scores in sets:
            commands += [("ZADD", key, score, name) for name, score in scores.items()]
        return commands

    async def _forget_after(self, stream: str, key: str, last: int, write: Write, alive: Callable[[], None]) -> None:
        """Delete the entries of a history that will be written again: those numbered by `key` after `last`. Any that cannot be
        read stay.
        """
        async for entries in self._pages(stream, newest_first=True):
            alive()
            numbers = [read_record(entry).get(key) for entry in entries]
            gone = [entry for (entry, _), number in zip(entries, numbers, strict=True) if number is not None and number > last]
            await write([("XDEL", stream, *gone)] if gone else [])

    async def _has_entry(self, stream: str, key: str, number: int) -> bool:
        """Return whether a history has an entry that `key` numbers so."""
        async for entries in self._pages(stream, newest_first=True):
            if any(read_record(entry).get(key) == number for entry in entries):
                return True
        return False


def _plan(snapshot: Snapshot, keep_plans: bool) -> Restoration:
    fresh = {name for plan in snapshot.head.plans.values() for name in plan["fresh"].decode().split()}
    untrained, planned = dict[str, int](), dict[str, int]()
    for piece in snapshot.pieces():
        for group in piece.groups if isinstance(piece, Groups) else ():
            if group.name in fresh:
                planned[group.name] = group.seq
            elif group.version is not None and int(group.fields["uses"]) == 0:
                untrained[group.name] = group.seq
    return restoration(snapshot.head, untrained, planned, keep_plans)


def _placed(piece: Groups, fence: int) -> tuple[Groups, dict[str, bytes]]:
    """Return groups with the places of their payloads in shards instead of the payloads, and these by place."""
    groups, payloads = list[SnapshotGroup](), dict[str, bytes]()
    for group in piece.groups:
        if group.payload is not None:
            place = restored_place(group.fields["payload"].decode(), fence)
            payloads[place] = group.payload
            group = msgspec.structs.replace(group, payload=place.encode())
        groups.append(group)
    return Groups(groups), payloads


def _flat(fields: Mapping[str, Any]) -> list[Any]:
    return [part for item in fields.items() for part in item]
