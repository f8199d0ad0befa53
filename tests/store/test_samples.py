"""Finished groups are kept for the sample log, up to a limit and only while its tracker is alive."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from services.protocol import codec
from services.protocol.errors import Fenced
from services.protocol.messages import Header
from services.store import Store
from services.store.samples import WHOLE, is_sampled
from services.store.snapshot_format import Snapshot
from tests.support.flow import Team, buffer, claim, issue, prepare, settle, start, submit


async def attached(store: Store, share: float = 1.0, lease_s: float = 60.0) -> Team:
    team = await start(store, slots=64)
    await store.samples.log(await incarnation(store), -1, share, lease_s)
    return team


async def incarnation(store: Store) -> int:
    state = await store.run.state()
    assert state is not None
    return state.incarnation


async def drop(store: Store, team: Team, count: int, action: str = "filtered:zero") -> list[str]:
    """Finish `count` groups that do not enter the table; return the names of their payloads."""
    await issue(store, team, count)
    claims = await claim(store, "g", count)
    for one in claims:
        assert await submit(store, "g", one)
    assert await settle(store, team, action) == count
    return [one.payload for one in claims]


async def test_a_dropped_group_keeps_its_tokens_until_it_is_logged(store: Store) -> None:
    team = await attached(store)
    [name] = await drop(store, team, 1)
    [waiting] = await store.samples.waiting(10)
    assert (waiting.outcome, waiting.payload, waiting.step) == ("filtered:zero", name, 0)
    assert not await store.client.exists(store.keys.group(waiting.ticket))
    assert codec.decode(waiting.header, Header).ticket == waiting.ticket
    assert list(await store.samples.payloads([name, "0-9.9"])) == [name]
    for _ in range(2):  # the second call finds nothing to do
        assert await store.samples.log(waiting.incarnation, -1, 1.0, 60.0, [waiting.entry]) == 0
    assert await store.samples.payloads([name]) == {}
    assert await store.client.hget(store.keys.samples_state, "bytes") == b"0"
    assert await store.samples.missed() == {}


async def test_without_a_tracker_nothing_waits(store: Store) -> None:
    team = await start(store)
    [name] = await drop(store, team, 1)
    assert await store.samples.waiting(10) == []
    assert await store.samples.payloads([name]) == {}
    assert await store.samples.missed() == {}


async def test_samples_missed_by_a_lost_tracker_are_counted(store: Store) -> None:
    team = await attached(store, lease_s=0.0)
    names = await drop(store, team, 2) + await drop(store, team, 1, "stale")
    assert await store.samples.waiting(10) == []
    assert await store.samples.payloads(names) == {}
    assert await store.samples.missed() == {"filtered": 2, "stale": 1}


async def test_the_bytes_that_wait_are_limited(store: Store) -> None:
    team = await attached(store)
    await store.client.hset(store.keys.samples_state, "bytes", str(64 << 20))
    await drop(store, team, 1)
    assert await store.samples.waiting(10) == []
    assert await store.samples.missed() == {"filtered": 1}


async def test_the_reason_of_a_failure_is_bounded_and_counted(store: Store) -> None:
    team = await attached(store)
    await issue(store, team, 40)
    for one in await claim(store, "g", 40):
        assert await store.tickets.fail("g", one, "x" * 100_000, 1)
    waiting = await store.samples.waiting(50)
    assert [len(one.outcome) for one in waiting] == [4096] * 40
    counted = int(await store.client.hget(store.keys.samples_state, "bytes") or 0)
    assert counted == sum(len(one.outcome) + len(one.header) for one in waiting)
    assert await store.client.memory_usage(store.keys.samples, samples=0) < 1 << 20


async def test_redis_and_python_sample_the_same_tickets(store: Store) -> None:
    team = await attached(store, share=0.3)
    await drop(store, team, 20)
    there = {one.ticket for one in await store.samples.waiting(100)}
    assert there == {f"0-{row}" for row in range(20) if is_sampled(f"0-{row}", 0.3)}
    assert 0 < len(there) < 20
    assert not is_sampled("0-0", 0.0)
    assert round(1.0 * WHOLE) == WHOLE


async def test_failed_tickets_and_stale_groups_wait_too(store: Store) -> None:
    team = await attached(store)
    await issue(store, team, 1)
    [one] = await claim(store, "g", 1)
    assert await store.tickets.fail("g", one, "the engine refused it", 1)
    await buffer(store, team, 1)
    await store.replay.sweep_and_peek(team.leader, 5, 1, 0)
    assert not await store.client.exists(store.keys.group("0-1"))
    outcomes = {(each.ticket, each.outcome): each.payload for each in await store.samples.waiting(10)}
    assert outcomes.keys() == {("0-0", "failed:the engine refused it"), ("0-1", "stale")}
    assert outcomes["0-0", "failed:the engine refused it"] == ""
    assert len(await store.samples.payloads([outcomes["0-1", "stale"]])) == 1


@pytest.mark.parametrize("covered", [1, 17])
async def test_a_step_is_deleted_once_it_is_logged_or_too_many_wait(store: Store, covered: int) -> None:
    team = await attached(store)
    for step in range(covered + 1):
        await prepare(store, team, step, await buffer(store, team, 1, oldest=step))
        await store.steps.commit(team.trainer, step)
        await store.steps.publish(team.trainer, step + 1)
    await store.steps.checkpointed(team.trainer, covered)
    late = max(0, covered + 1 - 16)  # above the limit
    assert await store.steps.retire() == late
    assert await store.samples.missed() == ({"trained": late} if late else {})
    await store.samples.log(await incarnation(store), covered, 1.0, 60.0)
    assert await store.steps.retire() == covered + 1 - late
    assert (await store.samples.missed()).get("trained", 0) == late


async def train(store: Store, team: Team, step: int) -> None:
    await prepare(store, team, step, await buffer(store, team, 1, oldest=step))
    await store.steps.commit(team.trainer, step)
    await store.steps.publish(team.trainer, step + 1)
    await store.steps.checkpointed(team.trainer, step)


async def test_a_step_does_not_wait_for_a_lost_tracker(store: Store) -> None:
    team = await attached(store, lease_s=0.0)
    await train(store, team, 0)
    assert await store.steps.retire() == 1
    assert await store.samples.missed() == {"trained": 1}


async def test_reports_of_an_earlier_incarnation_are_ignored(store: Store) -> None:
    team = await attached(store)
    now = await incarnation(store)
    await store.samples.log(now - 5, 40, 1.0, 60.0)
    await train(store, team, 0)
    assert await store.steps.retire() == 0
    await store.samples.log(now, 0, 1.0, 60.0)
    assert await store.steps.retire() == 1


async def test_a_restore_resets_what_counts_as_logged(store: Store, tmp_path: Path) -> None:
    team = await attached(store)
    await train(store, team, 0)
    await store.samples.log(await incarnation(store), 40, 1.0, 60.0)
    assert await store.steps.retire() == 1
    await store.snapshots.save(team.trainer, 0, tmp_path / "s", payloads=True)
    trainer = await store.run.attach_trainer()
    await store.restores.restore(trainer, Snapshot(tmp_path / "s"), True, lambda: None)
    leader = await store.run.lead("after", 60.0)
    assert leader is not None
    await store.steps.publish(trainer, 1)
    await train(store, Team(leader, trainer), 1)
    assert await store.steps.retire() == 0
    await store.samples.log(await incarnation(store), 1, 1.0, 60.0)
    assert await store.steps.retire() == 1


async def test_steps_that_a_restore_deletes_unread_are_missed(store: Store, tmp_path: Path) -> None:
    """Each counts once, however often the restore is interrupted. Logged or retired steps do not count."""
    team = await attached(store)
    for step in range(2):
        await train(store, team, step)
    await store.samples.log(await incarnation(store), 0, 1.0, 60.0)
    assert await store.steps.retire() == 1
    await store.snapshots.save(team.trainer, 1, tmp_path / "s", payloads=True)
    for step in range(2, 4):
        await train(store, team, step)
    interrupted, trainer = await store.run.attach_trainer(), 0
    for trainer in (interrupted, await store.run.attach_trainer()):
        with suppress(Fenced):
            await store.connection.call("restore_begin", trainer, 1)
    await store.restores.restore(trainer, Snapshot(tmp_path / "s"), True, lambda: None)
    assert await store.samples.missed() == {"trained": 3}


async def test_a_group_that_a_restore_brings_back_keeps_its_tokens(store: Store, tmp_path: Path) -> None:
    team = await attached(store)
    await train(store, team, 0)
    await buffer(store, team, 1, oldest=1)
    await store.snapshots.save(team.trainer, 0, tmp_path / "s", payloads=True)
    assert (await store.replay.sweep_and_peek(team.leader, 2, 1)).stale == 1
    [waiting] = await store.samples.waiting(10)
    trainer = await store.run.attach_trainer()
    await store.restores.restore(trainer, Snapshot(tmp_path / "s"), True, lambda: None)
    assert await store.samples.log(await incarnation(store), 0, 1.0, 60.0, [waiting.entry]) == 0
    assert list(await store.steps.payloads([waiting.payload])) == [waiting.payload]
