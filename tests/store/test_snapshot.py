"""Snapshots are consistent and restored completely. Unfinished work is reissued, and earlier callers are fenced off."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.console.run.redis_server import RedisServer
from services.operations.inspection.ledger import assess
from services.protocol.errors import Busy, Fenced, OutOfOrder, StoreError
from services.store import Store
from services.store import snapshot as snapshots
from services.store.records import Settlement, TableRules
from services.store.restore import RestoreWriter
from services.store.snapshot_format import Rows, Snapshot, SnapshotError
from tests.store.test_conservation import Walk, check_keys
from tests.support import flow
from tests.support.harness import ticket

VOLATILE = {b"leader", b"leader_until_ms", b"leader_fence", b"published_by", b"incarnation", b"published_version", b"slots_used",
            b"checkpointed_step", b"retired_step", b"evaluated_version", b"claim_fence", b"trainer_fence",
            b"restored_by", b"snapshot", b"snapshot_held", b"clock_ms", b"clock_ahead_ms"}  # fmt: skip


def ignored() -> None:
    """Do nothing, in place of a keep-alive."""


async def everything(store: Store) -> dict[str, Any]:
    """Return all keys of the run except those that a restore changes, and except unfinished work, which it reissues."""
    found: dict[str, Any] = {}
    passing = ("tickets", "headers", "claims", "attempts", "expiries", "reissue", "outstanding", "ledger", "payload", "departed",
               "answers", "claimed", "samples", "partial")  # fmt: skip
    async for key in store.client.scan_iter():
        name = key.decode().removeprefix(store.keys.prefix + ":")
        if name.split(":")[0] in passing:
            continue
        match (await store.client.type(key)).decode():
            case "hash":
                found[name] = {k: v for k, v in (await store.client.hgetall(key)).items() if k not in VOLATILE}  # type: ignore[misc]
            case "zset":
                found[name] = await store.client.zrange(key, 0, -1, withscores=True)
            case "list":
                found[name] = await store.client.lrange(key, 0, -1)  # type: ignore[misc]
            case "stream":
                found[name] = await store.client.xrange(key)
            case _:
                found[name] = await store.client.get(key)
    return found


async def busy_run(store: Store, seed: int, operations: int = 150) -> Walk:
    """Start a run, take it into the middle of a random walk, and cover its last commit by a checkpoint."""
    walk = Walk(store, seed)
    await walk.begin()
    for _ in range(operations):
        await walk.step()
    await store.steps.publish(walk.trainers[-1], (await walk.state()).committed_step + 1)
    await store.steps.checkpointed(walk.trainers[-1], (await walk.state()).committed_step)
    await store.steps.retire()
    return walk


async def save(store: Store, trainer: int, path: Path, payloads: bool) -> None:
    """Save a snapshot as a trainer that holds the weights of the last committed step."""
    state = await store.run.state()
    assert state is not None
    await store.snapshots.save(trainer, state.committed_step, path, payloads)


async def restore(store: Store, path: Path, keep_plans: bool = True) -> int:
    """Restore the snapshot as a new trainer; return its fencing number."""
    trainer = await store.run.attach_trainer()
    await store.restores.restore(trainer, Snapshot(path), keep_plans, ignored)
    return trainer


async def names_of(store: Store, count: int = 1000) -> list[str]:
    return [name for name, _ in await store.tickets.reissue(count)]


@pytest.mark.parametrize("seed", range(4))
async def test_a_run_lost_by_redis_is_restored_whole(store: Store, tmp_path: Path, seed: int) -> None:
    walk = await busy_run(store, seed)
    await save(store, walk.trainers[-1], tmp_path / "s", payloads=True)
    before, outstanding = (
        await everything(store),
        await store.client.zrange(store.keys.outstanding, 0, -1, withscores=True),
    )
    await store.restores.delete_run()
    await store.run.create("config", "dataset", 1000, 12)  # what dataprep does when it finds no run
    await restore(store, tmp_path / "s")
    after = await everything(store)
    assert after.pop("run").items() >= {k: v for k, v in before.pop("run").items() if k != b"created_ms"}.items()
    assert after == before
    assert await store.client.zrange(store.keys.outstanding, 0, -1, withscores=True) == outstanding
    assert await names_of(store) == [name.decode() for name, _ in outstanding], "in the order in which they were issued"
    report = assess("run", await store.run.audit())
    assert report.ok, report.messages


@pytest.mark.parametrize("seed", range(6))
async def test_repeated_restores_lose_and_duplicate_nothing(store: Store, tmp_path: Path, seed: int) -> None:
    walk, dice = await busy_run(store, 100 + seed, 60), random.Random(seed)
    kept, state = list[Path](), await walk.state()
    for number in range(8):
        path = tmp_path / str(number)
        await save(store, walk.trainers[-1], path, payloads=dice.random() < 0.5)
        kept.append(path)
        for _ in range(40):
            await walk.step()
            if dice.random() < 0.3:
                found = await store.tickets.reissue(dice.randint(1, 4))
                tickets = [ticket(seq) for _, seq in found]
                assert await store.tickets.issue_again(walk.leaders[-1], tickets) == len(found)
                assert await store.tickets.issue_again(walk.leaders[-1], tickets) == 0, "a repeated call"
        walk.trainers.append(await restore(store, dice.choice(kept), keep_plans=dice.random() < 0.7))
        report = assess("run", await store.run.audit())
        assert report.ok, report.messages
        await check_keys(store)
        before, state = state, await walk.state()
        assert state.incarnation > before.incarnation
        assert state.restoring == -1
        await walk.change_leader()
        await store.steps.publish(walk.trainers[-1], state.published_version)
    found = await store.tickets.reissue(1000)
    await store.tickets.issue_again(walk.leaders[-1], [ticket(seq) for _, seq in found])
    await walk.wind_up()
    report = assess("run", await store.run.audit())
    assert report.ok, report.messages
    assert (report.places["tickets"], report.places["reissue"], report.slots_used) == (0, 0, 0)


async def test_a_fork_with_fewer_slots_reissues_no_more_than_it_can_train_in_time(store: Store, tmp_path: Path) -> None:
    store, walk = store, Walk(store, 0)
    await store.run.create("config", "dataset", 1000, 12)
    await walk.change_leader()
    await walk.change_trainer()
    await store.steps.publish(walk.trainers[-1], 0)
    assert await store.tickets.issue(walk.leaders[-1], 0, [ticket(seq) for seq in range(12)], b"", {})
    await store.snapshots.save(walk.trainers[-1], -1, tmp_path / "s", payloads=True)
    await store.restores.delete_run()
    await store.run.create("config", "dataset", 1000, 4)
    walk.trainers.append(await restore(store, tmp_path / "s"))
    await walk.change_leader()
    leader = walk.leaders[-1]
    for step in range(6):
        await store.steps.publish(walk.trainers[-1], step)
        again = [ticket(seq) for _, seq in await store.tickets.reissue(100)]
        assert await store.tickets.issue_again(leader, again) == (4 if step == 0 else 2 if step < 5 else 0)
        assert await store.tickets.issue_again(leader, again) == 0, "a repeated call"
        for claim in await flow.claim(store, "g", 2, step):
            await flow.submit(store, "g", claim)
        for item in await store.replay.read_headers(leader, 2):
            await store.replay.settle(leader, [Settlement(item, "insert")])
        first = [group for group, _ in (await store.replay.sweep_and_peek(leader, 0, 2)).first]
        await store.steps.prepare(leader, *flow.plan(step, first), 0, [1.0] * len(first))
        assert await store.steps.commit(walk.trainers[-1], step)
    report = assess("run", await store.run.audit())
    assert (report.messages, report.outcomes["trained"]) == ((), 12)


async def test_without_payloads_untrained_tickets_are_reissued_in_order(store: Store, tmp_path: Path) -> None:
    team = await flow.start(store, slots=12)
    await flow.buffer(store, team, 6)
    for step, groups in ((0, ["0-0", "0-1"]), (1, ["0-2", "0-3"])):
        await flow.prepare(store, team, step, groups)
    await store.steps.commit(team.trainer, 0)
    await flow.issue(store, team, 2)
    await flow.claim(store, "g")
    await save(store, team.trainer, tmp_path / "s", payloads=False)
    await restore(store, tmp_path / "s")
    state = await store.run.state()
    assert state is not None
    assert (state.committed_step, state.prepared_step, state.published_version, state.cursor) == (0, 0, 1, 8)
    assert await store.tickets.reissue(9) == [(f"0-{seq}", seq) for seq in range(2, 8)], "0-0 and 0-1 are trained"
    audit = await flow.counts(store)
    assert (audit["ledger:trained"], audit["outstanding"], audit["slots_used"], audit["reissue"]) == (2, 6, 6, 6)
    assert await store.replay.groups(["0-4", "0-2"]) == []


async def test_a_restore_keeps_the_order_of_requeued_letters(store: Store, tmp_path: Path) -> None:
    team = await flow.start(store, slots=12)
    await flow.issue(store, team, 12)
    for one in await flow.claim(store, "g", 12):
        await store.tickets.fail("g", one, "verifier broke", max_attempts=1)
    letters = {letter.ticket: letter.id for letter in await store.dead_letters.page()}
    waiting = [f"0-{row}" for row in (11, 2, 10, 9, 0)]
    await store.dead_letters.requeue([letters[name] for name in waiting])
    await save(store, team.trainer, tmp_path / "s", payloads=False)
    await store.dead_letters.requeue([letters["0-5"]])
    await restore(store, tmp_path / "s")
    assert await store.tickets.requeued(20) == waiting
    (answer,) = await store.dead_letters.requeue([letters["0-5"]])
    assert (answer.refusal, answer.before) == ("", False)
    assert await store.tickets.requeued(20) == [*waiting, "0-5"]
    report = assess("run", await store.run.audit())
    assert report.ok, report.messages


async def test_filtered_groups_keep_their_place_in_a_replanned_step(store: Store, tmp_path: Path) -> None:
    team = await flow.start(store)
    await flow.buffer(store, team, 1)
    await flow.issue(store, team, 1)
    (one,) = await flow.claim(store, "g")
    await flow.submit(store, "g", one)
    await flow.settle(store, team, "filtered:zero")
    await store.steps.prepare(team.leader, *flow.plan(0, ["0-0"]), 0, [], gaps_until=1)
    assert (await store.replay.sweep_and_peek(team.leader, 0, 4)).gaps == ()
    await save(store, team.trainer, tmp_path / "s", payloads=False)
    await restore(store, tmp_path / "s")
    leader = await store.run.lead("next", 60)
    assert leader is not None
    assert (await store.replay.sweep_and_peek(leader, 0, 4)).gaps == (1,)


async def test_the_leader_is_blocked_only_while_a_snapshot_is_taken(store: Store) -> None:
    team = await flow.start(store)
    await flow.buffer(store, team, 1)
    await store.connection.call("snapshot_begin", team.trainer, 2, 60_000)
    for call in (
        store.replay.sweep_and_peek(team.leader, 0, 1),
        flow.issue(store, team, 1),
        flow.prepare(store, team, 0, ["0-0"]),
    ):
        with pytest.raises(Busy, match="a snapshot is being taken: try again in a moment"):
            await call
    assert await store.connection.call("snapshot_hold", team.trainer, 2, 60_000) == 1
    assert await store.connection.call("snapshot_end", team.trainer, 1) == 0
    assert await store.connection.call("snapshot_end", team.trainer, 2) == 1
    await flow.prepare(store, team, 0, ["0-0"])
    await store.connection.call("snapshot_begin", team.trainer, 3, 0)
    assert await flow.issue(store, team, 1) == 1, "the writer died: its lease has expired"
    assert await store.connection.call("snapshot_hold", team.trainer, 3, 60_000) == 0
    assert await store.connection.call("snapshot_end", team.trainer, 3) == 0


async def test_a_snapshot_slower_than_its_lease_is_retried(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    team = await flow.start(store)
    await flow.buffer(store, team, 2)
    monkeypatch.setattr(snapshots, "LEASE_S", 0.0)
    with pytest.raises(StoreError, match="snapshot failed"):
        await save(store, team.trainer, tmp_path / "s", payloads=True)
    leases = iter([0.0, 60.0, 60.0, 60.0, 60.0])
    monkeypatch.setattr(snapshots, "LEASE_S", type("Lease", (), {"__rmul__": lambda _, k: k * next(leases)})())
    await save(store, team.trainer, tmp_path / "s", payloads=True)
    assert Snapshot(tmp_path / "s").head.whole


async def test_callers_from_before_a_restore_are_rejected(store: Store, tmp_path: Path) -> None:
    team = await flow.start(store, slots=12)
    await flow.buffer(store, team, 2)
    await save(store, team.trainer, tmp_path / "s", payloads=True)
    await flow.issue(store, team, 2)
    (held,) = await flow.claim(store, "g")
    trainer = await restore(store, tmp_path / "s")
    for call in (store.steps.commit(team.trainer, 0), store.replay.sweep_and_peek(team.leader, 0, 1)):
        with pytest.raises(Fenced):
            await call
    assert not await flow.submit(store, "g", held), "a submission from before the restore counted"
    assert await store.tickets.renew("g", [held]) == {held.entry}
    assert await store.tickets.reissue(9) == [], "0-2 and 0-3 were issued later and are no longer known"
    leader = await store.run.lead("next", 60)
    assert leader is not None
    assert await flow.issue(store, flow.Team(leader, trainer), 1) == 1
    assert (await store.tickets.claim("g", 0, team.trainer, 60, 1))[1] == [], "weights from before the restore"
    assert (await store.tickets.claim("g", 0, trainer, 60, 1))[1] == [], "nothing is published yet"
    await store.steps.publish(trainer, 0)
    assert [claim.ticket_id for claim in (await store.tickets.claim("g", 0, trainer, 60, 1))[1]] == ["0-2"]


async def test_an_interrupted_restore_must_be_started_again(store: Store, tmp_path: Path) -> None:
    team = await flow.start(store)
    await flow.buffer(store, team, 3)
    await flow.prepare(store, team, 0, ["0-0"])
    await store.steps.commit(team.trainer, 0)
    await save(store, team.trainer, tmp_path / "s", payloads=True)
    before = await store.run.audit()
    trainer = await store.run.attach_trainer()

    class Killed(Exception):
        pass

    def die() -> None:
        raise Killed

    with pytest.raises(Killed):
        await store.restores.restore(trainer, Snapshot(tmp_path / "s"), True, die)
    state = await store.run.state()
    assert state is not None
    assert state.restoring == 0
    assert await store.run.lead("next", 60) is None
    assert (await store.tickets.claim("g", -1, 0, 60, 1))[1] == []
    for call in (store.run.audit(), store.dead_letters.requeue(["1-1"])):
        with pytest.raises(Busy, match="the run is being restored to step 0"):
            await call
    await restore(store, tmp_path / "s")
    after = await store.run.audit()
    assert {name: count for name, count in after.items() if name != "unpublished"} == {
        name: count for name, count in before.items() if name != "unpublished"
    } | {"ledger:reissued": 0, "slots_used": 2, "ledger:syncs": 1}


async def test_an_ended_run_can_be_restored_but_a_restoring_one_cannot_end(store: Store, tmp_path: Path) -> None:
    team = await flow.start(store)
    await flow.buffer(store, team, 1)
    await flow.prepare(store, team, 0, ["0-0"])
    await store.steps.commit(team.trainer, 0)
    await save(store, team.trainer, tmp_path / "s", payloads=False)
    await store.run.finish("trained 1 of 1 steps")
    await store.run.request_restore(0)
    with pytest.raises(OutOfOrder, match="the run cannot end: it is being restored to step 0"):
        await store.run.finish("trained 1 of 1 steps")
    state = await store.run.state()
    assert state is not None
    assert (state.restore, state.finished, state.ended) == (0, "", False)
    with pytest.raises(OutOfOrder, match="it is being restored to step 0"):
        await store.run.stop("no prompt is left")
    await restore(store, tmp_path / "s")
    await store.run.finish("trained 1 of 1 steps")
    state = await store.run.state()
    assert state is not None
    assert (state.restore, state.finished) == (-1, "trained 1 of 1 steps")


async def test_a_trainer_that_hung_in_a_restore_is_fenced_off(store: Store, tmp_path: Path) -> None:
    team = await flow.start(store)
    await flow.buffer(store, team, 3)
    await flow.prepare(store, team, 0, ["0-0"])
    await store.steps.commit(team.trainer, 0)
    await save(store, team.trainer, tmp_path / "s", payloads=True)
    hung = await store.run.attach_trainer()

    class Late(Exception):
        pass

    def wake() -> None:
        raise Late

    with pytest.raises(Late):
        await store.restores.restore(hung, Snapshot(tmp_path / "s"), True, wake)
    await restore(store, tmp_path / "s")
    before = await everything(store)
    with pytest.raises(Fenced):
        await RestoreWriter(store.connection, hung, 0).delete([store.keys.replay_order.encode()])
    state = await store.run.state()
    assert state is not None
    with pytest.raises(OutOfOrder, match="no restore to step 1"):
        await RestoreWriter(store.connection, state.trainer_fence, 1).delete([store.keys.replay_order.encode()])
    assert await everything(store) == before


async def test_a_snapshot_must_match_the_step_of_the_weights(store: Store, tmp_path: Path) -> None:
    team = await flow.start(store)
    await flow.buffer(store, team, 2)
    await flow.prepare(store, team, 0, ["0-0"])
    await store.steps.commit(team.trainer, 0)
    for step in (-1, 1):
        with pytest.raises(StoreError, match=f"has committed step 0, but the weights are those after step {step}"):
            await store.snapshots.save(team.trainer, step, tmp_path / "s", payloads=True)
    assert await flow.issue(store, team, 1) == 1, "the leader is not blocked"


async def test_history_after_the_checkpoint_is_forgotten(store: Store, tmp_path: Path) -> None:
    team = await flow.start(store)
    await flow.buffer(store, team, 3)
    for step in range(3):
        await flow.prepare(store, team, step, [f"0-{step}"])
        await store.steps.commit(team.trainer, step)
        await store.monitor.record({"step": float(step), "reward/train/mean": 0.5})
        if step == 1:
            await save(store, team.trainer, tmp_path / "s", payloads=True)
    await restore(store, tmp_path / "s")
    assert [record["step"] for _, record in await store.monitor.metrics()] == [0.0, 1.0]


async def test_dead_letters_pass_rates_and_drops_are_restored(store: Store, tmp_path: Path) -> None:
    team = await flow.start(store)
    await flow.issue(store, team, 2)
    for claim in await flow.claim(store, "g", 2):
        assert await store.tickets.fail("g", claim, "no reason", 1)
    letters = await store.dead_letters.page()
    await store.client.hset(store.keys.rates, mapping={str(row): f"{row} 0.5 0" for row in range(1000)})  # type: ignore[misc]
    await save(store, team.trainer, tmp_path / "s", payloads=False)
    rates = await store.replay.rates()
    await store.restores.delete_run()
    await store.run.create("config", "dataset", 100, 8, TableRules())
    await restore(store, tmp_path / "s")
    assert await store.dead_letters.page() == letters
    assert await store.replay.rates() == rates
    assert len(rates) == 1000


async def test_damaged_snapshot_files_are_detected(store: Store, tmp_path: Path) -> None:
    team = await flow.start(store)
    await flow.buffer(store, team, 3)
    path = tmp_path / "s"
    await save(store, team.trainer, path, payloads=True)
    whole, dice = path.read_bytes(), random.Random(0)
    for _ in range(300):
        damaged = bytearray(whole[: dice.randrange(len(whole))] if dice.random() < 0.4 else whole)
        for _ in range(dice.randrange(4)):
            if damaged:
                damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(SnapshotError):  # any other exception is a failure
            list(Snapshot(path).pieces())
    with pytest.raises(SnapshotError, match="cannot be read: No such file"):
        Snapshot(tmp_path / "none")


async def test_a_snapshot_under_load_is_consistent(store: Store, tmp_path: Path) -> None:
    """Snapshots are taken while generators claim, submit and fail and a leader settles. Each accounts for all of its tickets."""
    walk = await busy_run(store, 7, 60)
    going = True

    async def work() -> None:
        while going:
            try:
                await walk.step()
            except Busy:
                await asyncio.sleep(0)

    trainers = {walk.change_trainer, walk.commit, walk.publish, walk.checkpoint, walk.reweigh}
    walk.operations = [operation for operation in walk.operations if operation not in trainers]
    working = asyncio.create_task(work())
    paths = [tmp_path / str(number) for number in range(12)]
    for number, path in enumerate(paths):
        await save(store, walk.trainers[-1], path, payloads=number % 2 == 0)
        await asyncio.sleep(0.02)
    going = False
    await working
    for path in paths:
        await restore(store, path)
        report = assess("run", await store.run.audit())
        assert report.ok, report.messages
        await check_keys(store)


@pytest.mark.parametrize(("payloads", "base"), [(True, 16), (False, 0)])
async def test_a_table_restored_empty_forgets_the_base_of_recency_weights(
    store: Store, tmp_path: Path, payloads: bool, base: int
) -> None:
    team = await flow.start(store, table=TableRules("prioritized", "fifo", 100, 0))
    await flow.buffer(store, team, 2)
    await store.replay.rescale(team.leader, 0, 16, 2.0**-16)
    await save(store, team.trainer, tmp_path / "s", payloads)
    await restore(store, tmp_path / "s")
    assert await store.replay.recency_base() == base, "steps before version 16 are planned again"


async def test_a_copy_that_begins_slowly_renews_its_lease_in_time(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = await flow.start(store)
    await flow.buffer(store, team, 3)
    for name, value in {"LEASE_S": 3.0, "HOLD_S": 1.0, "TOGETHER": 1, "ATTEMPTS": 1}.items():
        monkeypatch.setattr(snapshots, name, value)
    for name, delay_s in {"_head": 2.0, "_groups": 0.6}.items():
        monkeypatch.setattr(snapshots.SnapshotWriter, name, delayed(getattr(snapshots.SnapshotWriter, name), delay_s))
    await store.snapshots.save(team.trainer, -1, tmp_path / "s", payloads=False)
    await restore(store, tmp_path / "s")
    assert len(await names_of(store)) == 3, "the copy has all groups"


def delayed(method: Any, delay_s: float) -> Any:
    async def slow(*args: Any) -> Any:
        await asyncio.sleep(delay_s)
        return await method(*args)

    return slow


async def test_a_copy_during_which_the_server_restarted_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = RedisServer(tmp_path / "redis", appendfsync="always")
    server.start()
    scan, restarted = snapshots.SnapshotWriter._scan, list[str]()

    async def interrupted(self: Any, key: str) -> AsyncIterator[dict[str, bytes]]:
        async for fields in scan(self, key):
            yield fields
            if not restarted:
                restarted.append(key)
                await asyncio.to_thread(server.stop)
                await asyncio.to_thread(server.start)

    monkeypatch.setattr(snapshots.SnapshotWriter, "_scan", interrupted)
    store = await Store.connect(server.url, "restarted", server.password)
    try:
        team = await flow.start(store)
        await store.client.hset(store.keys.rates, mapping={str(row): f"{row} 0.5 0" for row in range(3000)})  # type: ignore[misc]
        await store.snapshots.save(team.trainer, -1, tmp_path / "s", payloads=False)
    finally:
        await store.close()
        await asyncio.to_thread(server.stop)
    assert restarted
    rows = [piece.fields for piece in Snapshot(tmp_path / "s").pieces() if isinstance(piece, Rows) and piece.key == "rates"]
    assert len({row for fields in rows for row in fields}) == 3000
