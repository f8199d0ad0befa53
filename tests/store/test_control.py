"""Control: a run's identity, leadership and desired state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from services.protocol.errors import DifferentRun
from services.protocol.keys import Keys
from services.store import Store
from services.store.connection import Connection
from tests.support.flow import issue, start
from tests.support.harness import ticket, wait_until


async def test_creating_an_existing_run_attaches_to_it(store: Store) -> None:
    assert await store.run.state() is None
    assert await store.run.create("config", "data", 10, 4)
    assert not await store.run.create("config", "data", 10, 4)
    state = await store.run.state()
    assert state is not None
    assert (state.steps, state.slots, state.slots_used, state.cursor) == (10, 4, 0, 0)
    assert (state.published_version, state.prepared_step, state.committed_step, state.checkpointed_step) == (-1, -1, -1, -1)
    assert not state.ended


async def test_more_steps_resume_a_finished_run(store: Store) -> None:
    assert not await store.run.set_steps(3), "there is no run yet"
    await store.run.create("config", "data", 10, 4)
    fence = await store.run.attach_trainer()
    assert not await store.run.set_steps(10)
    await store.run.finish("trained", fence)

    async def after(steps: int) -> tuple[bool, int, str]:
        changed, state = await store.run.set_steps(steps), await store.run.state()
        assert state is not None
        return changed, state.steps, state.finished

    await store.client.hset(store.keys.run, "committed_step", 9)  # type: ignore[misc]
    assert await after(10) == (False, 10, "trained")
    assert await after(7) == (True, 7, "trained")
    assert await after(11) == (True, 11, "")


async def test_more_steps_resume_a_run_that_was_ended_early(store: Store) -> None:
    """A stop request that has taken effect does not stop the resumed run; a pending one still does."""
    await store.run.create("config", "data", 10, 4)
    fence = await store.run.attach_trainer()
    await store.run.stop("enough")
    assert await store.run.set_steps(11)
    state = await store.run.state()
    assert state is not None
    assert state.stopping == "enough"
    await store.run.finish("trained 4 of 11 steps", fence)
    assert await store.run.set_steps(12)
    state = await store.run.state()
    assert state is not None
    assert (state.finished, state.stopping) == ("", "")


async def test_a_late_repetition_sets_no_older_number_of_steps(store: Store) -> None:
    await store.run.create("config", "data", 10, 4)
    for token, steps, changed in (("a", 20, 1), ("b", 20, 0), ("c", 30, 1)):
        assert await store.connection.call("set_steps", token, steps) == changed
    for token, changed in (("a", 1), ("b", 0)):
        assert await store.connection.call("set_steps", token, 20) == changed
    state = await store.run.state()
    assert state is not None
    assert state.steps == 30


@pytest.mark.parametrize(("config", "data", "what"), [("other", "data", "configuration"), ("config", "other", "data set")])
async def test_a_different_run_of_the_same_name_is_rejected(store: Store, config: str, data: str, what: str) -> None:
    await store.run.create("config", "data", 10, 4)
    with pytest.raises(DifferentRun, match=rf"exists with another {what} .*, not other: choose another run.name"):
        await store.run.create(config, data, 10, 4)


async def test_another_protocol_version_is_rejected(store: Store) -> None:
    await store.run.create("config", "data", 10, 4)
    await store.client.hset(store.keys.run, "protocol", "999")  # type: ignore[misc]
    with pytest.raises(DifferentRun, match="protocol version 999, but this program speaks"):
        await store.run.state()
    with pytest.raises(DifferentRun, match="protocol version"):
        await store.run.create("config", "data", 10, 4)


async def test_state_set_before_the_run_is_created_is_kept(store: Store) -> None:
    """A pause, a leader or a trainer may come first; fencing numbers stay valid."""
    await store.run.pause("generator", "early")
    leader = await store.run.lead("a", 60.0)
    trainer = await store.run.attach_trainer()
    assert leader is not None
    assert await store.run.state() is None, "paused, but not created"
    await store.run.create("config", "data", 10, 4)
    assert await store.run.lead("a", 60.0) == leader
    assert await store.tickets.issue(leader, 0, [ticket(0)]) == 1
    assert await store.steps.publish(trainer, 0)
    state = await store.run.state()
    assert state is not None
    assert state.paused == {"generator": "early"}


async def test_only_one_leads_at_a_time(store: Store) -> None:
    await store.run.create("config", "data", 10, 4)
    first = await store.run.lead("a", 60.0)
    assert first is not None
    assert await store.run.lead("b", 60.0) is None
    assert await store.run.lead("a", 60.0) == first, "a renewal keeps the number"
    await store.run.step_down("b")
    assert await store.run.lead("b", 60.0) is None, "only the leader can step down"
    await store.run.step_down("a")
    second = await store.run.lead("b", 60.0)
    assert second is not None
    assert second > first


async def test_an_expired_leadership_is_taken_over(store: Store) -> None:
    await store.run.create("config", "data", 10, 4)
    first = await store.run.lead("a", 0.05)
    assert first is not None

    async def taken() -> bool:
        return await store.run.lead("b", 60.0) is not None

    await wait_until(taken)
    assert await store.run.lead("a", 60.0) is None


async def test_fencing_numbers_are_not_reused_after_a_lost_write(store: Store) -> None:
    """With `appendfsync everysec` a crash may undo the last second, including fencing numbers."""
    await store.run.create("config", "data", 10, 4)
    before = await store.client.hgetall(store.keys.run)  # type: ignore[misc]
    given = await store.run.attach_trainer()
    await store.client.delete(store.keys.run)
    await store.client.hset(store.keys.run, mapping=before)  # type: ignore[misc]
    assert await store.run.attach_trainer() > given


async def test_desired_state_is_kept_with_its_reason(store: Store) -> None:
    await start(store)
    await store.run.pause("trainer", "by hand")
    await store.run.stop("enough")
    await store.run.finish("trained 3 of 10 steps")
    state = await store.run.state()
    assert state is not None
    assert (state.paused, state.stopping, state.finished) == ({"trainer": "by hand"}, "enough", "trained 3 of 10 steps")
    assert state.ended
    await store.run.resume("trainer")
    state = await store.run.state()
    assert state is not None
    assert state.paused == {}


async def test_a_reason_with_a_lone_surrogate_is_kept(store: Store) -> None:
    team = await start(store)
    await store.run.pause("trainer", "caf\udce9")
    await store.run.checkpoint_failed("/runs/caf\udce9 is full", team.trainer)
    assert await store.evaluation.open(team.leader, 0, [ticket(0)])
    assert await store.evaluation.abandon(team.leader, 0, "caf\udce9")
    state = await store.run.state()
    assert state is not None
    assert (state.paused["trainer"], state.checkpoint_failed) == ("caf?", "/runs/caf? is full")
    assert (await store.evaluation.state(60.0)).abandoned == "version 0: caf?"


async def test_requester_and_reason_of_a_resume_and_a_restore_are_kept(store: Store) -> None:
    team = await start(store)
    await store.run.pause("trainer", "ada: lunch")
    await store.run.resume("trainer", "bob: back")
    await store.run.request_restore(3, "ada: a spike at 4")
    state = await store.run.state()
    assert state is not None
    assert (state.paused, state.last_resume) == ({}, "bob: back")
    assert abs(state.last_resume_at - time.time()) < 60
    assert (state.restore, state.restore_why) == (3, "ada: a spike at 4")
    await store.client.hset(store.keys.run, "restore", "2")  # type: ignore[misc]  # by another request, half-way
    state = await store.run.state()
    assert state is not None
    assert (state.restore, state.restore_why) == (2, ""), "a reason belongs to its step"
    await store.run.restore_failed(3, "damaged", team.trainer)
    await store.run.resume("trainer")
    state = await store.run.state()
    assert state is not None
    assert (state.restore, state.last_resume, state.last_resume_at) == (2, "", 0.0)
    assert (state.restore_fault(3), state.restore_fault(2)) == ("damaged", ""), "the later request stays"
    await store.run.restore_failed(2, "damaged, too", team.trainer)
    state = await store.run.state()
    assert state is not None
    assert (state.restore, state.restore_why, state.restore_fault(2)) == (-1, "", "damaged, too")


@pytest.mark.parametrize("ended", [("finished", "trained 3 of 3 steps"), ("stopping", "ada: enough"), None])
async def test_a_restore_revives_an_ended_run_unless_it_fails(store: Store, ended: tuple[str, str] | None) -> None:
    team = await start(store)
    finish = {"finished": store.run.finish, "stopping": store.run.stop}
    if ended:
        await finish[ended[0]](ended[1])

    async def now() -> tuple[str, str]:
        state = await store.run.state()
        assert state is not None
        return state.finished, state.stopping

    before = await now()
    for step in (2, 3):
        await store.run.request_restore(step)
        assert await now() == ("", "")
    await store.run.restore_failed(2, "damaged", team.trainer)
    assert await now() == ("", ""), "another restore is requested"
    await store.run.restore_failed(3, "damaged", team.trainer)
    assert await now() == before
    await store.run.request_restore(2)
    await store.run.restore_failed(2, "damaged", team.trainer)
    assert await now() == before
    await store.run.request_restore(2)
    await store.run.set_steps(1000)
    await store.run.restore_failed(2, "damaged", team.trainer)
    assert await now() == ("", before[1] if not before[0] else ""), "a run that has steps left has not finished"
    await store.run.request_restore(1)
    trainer = await store.run.attach_trainer()
    await store.connection.call("restore_begin", trainer, 1)
    await store.run.restore_failed(1, "no space", trainer)
    assert await now() == ("", ""), "what has begun is not taken back"


async def test_metrics_are_read_in_order_from_any_point(store: Store) -> None:
    for step in range(3):
        await store.monitor.record({"step": float(step), "reward/train/mean": 0.5})
    entries = await store.monitor.metrics()
    assert [record["step"] for _, record in entries] == [0.0, 1.0, 2.0]
    assert [record["step"] for _, record in await store.monitor.metrics(after=entries[0][0])] == [1.0, 2.0]
    assert await store.monitor.metrics(after=entries[-1][0]) == []


async def test_two_runs_on_one_server_are_isolated(store: Store) -> None:
    other = Store(Connection(Keys(store.keys.name + "-b"), store.connection.url, store.connection.login))
    try:
        await start(store)
        await other.run.create("another", "data", 1, 1)
        await store.restores.delete_run()
        assert await store.run.state() is None
        assert await other.run.state() is not None
    finally:
        await other.restores.delete_run()
        await other.close()


@pytest.mark.parametrize("left", range(8))
async def test_a_deletion_that_was_interrupted_leaves_no_run(store: Store, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    """`left`: commands after which the process that deletes is killed."""
    send, sent = store.connection.send, 0

    async def send_some(*commands: tuple[Any, ...]) -> list[Any]:
        nonlocal sent
        for command in commands:
            sent += command[0] in ("HDEL", "UNLINK")
            if sent > left:
                raise asyncio.CancelledError
        return await send(*commands)

    async def one_by_one(keys: Sequence[bytes]) -> None:
        for key in keys:
            await store.connection.send(("UNLINK", key))

    delete = store.restores._delete_all_but
    team = await start(store)
    await issue(store, team, 2)
    monkeypatch.setattr(store.connection, "send", send_some)
    monkeypatch.setattr(store.restores, "_delete_all_but", lambda kept, _: delete(kept, one_by_one))
    with pytest.raises(asyncio.CancelledError):
        await store.restores.delete_run()
    monkeypatch.undo()
    if not left:
        assert not await store.run.create("config", "dataset", 100, 8)
        return
    before = await store.client.hgetall(store.keys.run)  # type: ignore[misc]
    for _ in range(2):
        with pytest.raises(DifferentRun, match=r"holds remains of a run 't-.*', whose deletion was interrupted: delete it"):
            await store.run.create("config", "dataset", 100, 8)
    assert await store.run.state() is None
    assert await store.client.hgetall(store.keys.run) == before  # type: ignore[misc]
    await store.restores.delete_run()
    assert await store.run.create("config", "dataset", 100, 8)


@pytest.mark.parametrize("key", ["tickets", "outstanding", "order", "replay:state"])
async def test_no_run_is_created_over_the_remains_of_another(store: Store, key: str) -> None:
    team = await start(store)
    await issue(store, team, 2)
    async for name in store.client.scan_iter(f"{store.keys.prefix}:*"):
        if name.decode() != f"{store.keys.prefix}:{key}":
            await store.client.unlink(name)
    with pytest.raises(DifferentRun, match="holds remains"):
        await store.run.create("config", "dataset", 100, 8)
    assert [name async for name in store.client.scan_iter("*")] == [f"{store.keys.prefix}:{key}".encode()]
