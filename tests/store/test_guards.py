"""The guards in the Redis Functions, each tested in the situation that it guards against."""

from __future__ import annotations

from typing import Any

import pytest

from services.operations.inspection.ledger import assess
from services.protocol.errors import Fenced, OutOfOrder, StoreError
from services.store import Settlement, Store
from services.store.records import TableRules
from tests.support import flow
from tests.support.flow import Team, buffer, claim, issue, prepare, settle, start, submit
from tests.support.harness import ticket

WHY = {"0-1": "its payload is gone"}


async def requeue_and_insert(store: Store, team: Team, row: int) -> None:
    """Requeue the dead letter of a row, and generate and insert its group again."""
    (letter,) = [letter for letter in await store.dead_letters.page() if letter.ticket == f"0-{row}"]
    (answer,) = await store.dead_letters.requeue([letter.id])
    assert answer.refusal == ""
    state = await store.run.state()
    assert state is not None
    assert await store.tickets.issue(team.leader, state.cursor, [ticket(row)], requeued=1) == 1
    (held,) = await claim(store, "g", version=state.published_version)
    assert await submit(store, "g", held, state.published_version)
    assert await settle(store, team) == 1


async def is_live(store: Store, group: str) -> bool:
    """Return whether a group of the table has its header and its payload."""
    (found,) = await store.replay.groups([group])
    return await store.client.exists(store.keys.payload(found.header.payload)) == 1


async def train(store: Store, team: Team, step: int) -> None:
    await store.steps.commit(team.trainer, step)
    await store.steps.publish(team.trainer, step + 1)
    await store.steps.checkpointed(team.trainer, step)
    await store.steps.retire()


async def test_retiring_a_step_keeps_a_discarded_group_that_returned(any_store: Store) -> None:
    team = await start(any_store)
    await buffer(any_store, team, 2)
    await prepare(any_store, team, 0, ["0-0", "0-1"])
    assert await any_store.steps.discard_damaged(team.trainer, 0, 0, WHY, [flow.plan(0, ["0-0"])]) == 1
    await requeue_and_insert(any_store, team, 1)
    await train(any_store, team, 0)
    assert await is_live(any_store, "0-1")


async def test_the_next_step_keeps_a_stale_group_that_returned(any_store: Store) -> None:
    team = await start(any_store, table=TableRules(max_uses=2))
    await buffer(any_store, team, 3)
    await prepare(any_store, team, 0, ["0-1"])
    assert (await any_store.replay.sweep_and_peek(team.leader, 1, 1)).stale == 3
    assert await any_store.steps.discard_damaged(team.trainer, 0, 0, WHY, [flow.plan(0, [])]) == 1
    await train(any_store, team, 0)
    await requeue_and_insert(any_store, team, 1)
    assert await issue(any_store, team, 1) == 1
    (held,) = await claim(any_store, "g", version=1)
    assert await submit(any_store, "g", held, 1)
    await settle(any_store, team)
    await prepare(any_store, team, 1, ["0-4"])
    await train(any_store, team, 1)
    assert await is_live(any_store, "0-1")


async def test_a_late_issue_skips_settled_tickets(any_store: Store) -> None:
    team = await start(any_store)
    await buffer(any_store, team, 1)
    await issue(any_store, team, 1)
    (held,) = await claim(any_store, "g")
    await submit(any_store, "g", held)
    await settle(any_store, team, "filtered:zero")
    assert await any_store.tickets.issue(team.leader, 1, [ticket(1)]) == 0
    assert (await any_store.run.audit())["ledger:issued"] == 2


@pytest.mark.parametrize("situation", ["outstanding", "trained"])
async def test_a_ticket_is_not_issued_twice_under_another_cursor(any_store: Store, situation: str) -> None:
    team = await start(any_store)
    await buffer(any_store, team, 1)
    await prepare(any_store, team, 0, ["0-0"])
    await train(any_store, team, 0)
    await issue(any_store, team, 1)
    row = 1 if situation == "outstanding" else 0
    with pytest.raises(OutOfOrder, match=f"ticket 0-{row} was issued before"):
        await any_store.tickets.issue(team.leader, 2, [ticket(row)])


async def test_a_superseded_trainer_does_not_end_the_run(any_store: Store) -> None:
    team = await start(any_store)
    await any_store.run.attach_trainer()
    with pytest.raises(Fenced):
        await any_store.run.finish("trained all", team.trainer)
    state = await any_store.run.state()
    assert state is not None
    assert state.finished == ""


async def begin_restore(store: Store, step: int = 0) -> int:
    trainer = await store.run.attach_trainer()
    assert await store.connection.call("restore_begin", trainer, step) == 1
    return trainer


async def test_a_run_being_restored_cannot_stop_and_voids_old_claims(any_store: Store) -> None:
    team = await start(any_store)
    await issue(any_store, team, 3)
    first, second = await claim(any_store, "g", 2)
    published = await flow.trainer_fence(any_store)
    trainer = await begin_restore(any_store)
    for end in (any_store.run.stop("enough"), any_store.run.finish("trained all", trainer)):
        with pytest.raises(OutOfOrder, match="it is being restored to step 0"):
            await end
    assert not await submit(any_store, "g", first)
    assert await any_store.tickets.renew("g", [second]) == {second.entry}
    assert (await any_store.tickets.claim("g", 0, published, 60, 3))[1] == []
    state = await any_store.run.state()
    assert state is not None
    assert (state.published_version, state.published_by, state.leader) == (-1, 0, "")
    assert await any_store.run.lead("leader-0:boot", 60) is None


async def test_a_superseded_trainer_cannot_restore(any_store: Store) -> None:
    team = await start(any_store)
    await issue(any_store, team, 1)
    before = await any_store.run.audit()
    await any_store.run.attach_trainer()
    with pytest.raises(Fenced):
        await any_store.connection.call("restore_begin", team.trainer, 0)
    assert await any_store.run.audit() == before
    trainer = await begin_restore(any_store)
    calls = (
        ("restore_write", 1, 4, "HSET", any_store.keys.run, "a", "b"), ("restore_delete", 1, any_store.keys.headers),
        ("restore_end", "cursor", 7),
    )  # fmt: skip
    for call, *args in calls:
        with pytest.raises(Fenced):
            await any_store.connection.call(call, team.trainer, 0, *args)
        with pytest.raises(OutOfOrder, match="no restore to step 3"):
            await any_store.connection.call(call, trainer, 3, *args)


async def test_pieces_of_a_restore_are_written_once_and_in_order(any_store: Store) -> None:
    await start(any_store)
    trainer = await begin_restore(any_store)
    key = any_store.keys.departed
    for piece in (1, 1, 2, 1, 2):
        assert await any_store.connection.call("restore_write", trainer, 0, piece, 3, "RPUSH", key, f"0-{piece}") == 1
    assert await any_store.client.lrange(key, 0, -1) == [b"0-1", b"0-2"]  # type: ignore[misc]
    with pytest.raises(OutOfOrder, match="piece 4 does not follow piece 2"):
        await any_store.connection.call("restore_write", trainer, 0, 4, 3, "RPUSH", key, "0-4")
    assert await any_store.connection.call("restore_begin", trainer, 0) == 1
    assert await any_store.connection.call("restore_delete", trainer, 0, 2, key) == 1
    assert await any_store.client.llen(key) == 2, "a repeated call changes nothing"  # type: ignore[misc]
    with pytest.raises(OutOfOrder, match="piece 4 does not follow piece 2"):
        await any_store.connection.call("restore_delete", trainer, 0, 4, key)
    with pytest.raises(StoreError, match="INVALID key of piece 3"):
        await any_store.connection.call("restore_delete", trainer, 0, 3, key, "grpo:{another}:run")
    assert await any_store.connection.call("restore_delete", trainer, 0, 3, key) == 1
    assert not await any_store.client.exists(key)


@pytest.mark.parametrize(
    "words",
    [
        ("DEL", "grpo:{another}:run"), ("GET", "{run}"), ("SET", "{run}", "a", "b"), ("ZADD", "{run}", "nan", "a"),
        ("HSET", "{run}", "a"), ("UNLINK", "{run}"), ("FLUSHALL", "{run}"), ("XDEL", "{run}", "last"),
        ("RPUSH", "{run}"), ("XADD", "{run}"),
    ],
)  # fmt: skip
async def test_a_restore_rejects_other_commands_and_keys(any_store: Store, words: tuple[str, ...]) -> None:
    await start(any_store)
    trainer = await begin_restore(any_store)
    command = [word.replace("{run}", any_store.keys.run) for word in words]
    with pytest.raises(StoreError, match="INVALID commands of piece 1"):
        await any_store.connection.call("restore_write", trainer, 0, 1, len(command), *command)


async def test_a_restore_keeps_a_newer_restore_request(any_store: Store) -> None:
    await start(any_store)
    await any_store.run.request_restore(0)
    trainer = await begin_restore(any_store)
    await any_store.run.request_restore(2)
    assert await any_store.connection.call("restore_end", trainer, 0, "cursor", 0) == 1
    assert await any_store.connection.call("restore_end", trainer, 0, "cursor", 5) == 0, "a repeated call"
    state = await any_store.run.state()
    assert state is not None
    assert (state.restore, state.restoring, state.cursor) == (2, -1, 0)


async def test_a_header_without_payload_is_rejected_and_its_ticket_kept(any_store: Store) -> None:
    team = await start(any_store)
    await issue(any_store, team, 1)
    (held,) = await claim(any_store, "g")
    args = ("g", held.entry, held.fence, held.ticket_id, b"header")
    assert await any_store.connection.call("submit", *args) == [-1]
    assert (await any_store.run.audit())["tickets"] == 1
    assert await submit(any_store, "g", held)


async def test_a_superseded_leader_cannot_pass_over_tickets(any_store: Store) -> None:
    team = await start(any_store)
    await issue(any_store, team, 1)
    (held,) = await claim(any_store, "g")
    await submit(any_store, "g", held)
    await settle(any_store, team, "filtered:zero")
    await any_store.run.step_down("leader-0:boot")
    successor = await any_store.run.lead("leader-1:boot", 60)
    assert successor is not None
    with pytest.raises(Fenced):
        await any_store.replay.pass_over(team.leader, 5)
    assert (await any_store.replay.sweep_and_peek(successor, 0, 1)).gaps == (0,)


@pytest.mark.parametrize("how", ["stopping", "finished", "paused"])
async def test_an_ending_or_paused_run_grants_no_claims(any_store: Store, how: str) -> None:
    team = await start(any_store)
    await issue(any_store, team, 1)
    end = {"stopping": any_store.run.stop, "finished": any_store.run.finish}.get(how)
    await (end("enough") if end else any_store.run.pause("generator", "a test"))
    assert await claim(any_store, "g") == []


async def test_a_prompt_trained_twice_is_counted(any_store: Store) -> None:
    team = await start(any_store)
    await buffer(any_store, team, 1)
    await prepare(any_store, team, 0, ["0-0"])
    await any_store.client.setbit(any_store.keys.trained(0), 0, 1)
    await any_store.steps.commit(team.trainer, 0)
    report = assess("run", await any_store.run.audit())
    assert (report.doubled, report.ok) == (1, False)


async def test_an_unprepared_step_is_not_committed(any_store: Store) -> None:
    team = await start(any_store)
    with pytest.raises(OutOfOrder, match="step 0 does not follow committed step -1"):
        await any_store.steps.commit(team.trainer, 0)


async def test_a_late_checkpoint_report_is_ignored(any_store: Store) -> None:
    team = await start(any_store)
    await buffer(any_store, team, 2)
    for step in (0, 1):
        await prepare(any_store, team, step, [f"0-{step}"])
        await any_store.steps.commit(team.trainer, step)
    await any_store.steps.checkpointed(team.trainer, 1)
    await any_store.run.request_checkpoint("before an upgrade")
    await any_store.run.checkpoint_failed("the disk is full")
    await any_store.steps.checkpointed(team.trainer, 0)
    state = await any_store.run.state()
    assert state is not None
    assert (state.checkpointed_step, state.checkpoint[-17:], state.checkpoint_failed) == (
        1,
        "before an upgrade",
        "the disk is full",
    )
    await any_store.steps.checkpointed(team.trainer, 1)
    state = await any_store.run.state()
    assert state is not None
    assert (state.checkpointed_step, state.checkpoint) == (1, "")


async def test_a_sweep_is_split_into_bounded_calls(any_store: Store) -> None:
    team = await start(any_store, slots=600)
    for _ in range(6):
        await buffer(any_store, team, 85)
    counts, *_ = await any_store.connection.call("sweep_and_peek", team.leader, 1, 0, 0)
    assert (counts[0], counts[1]) == (b"stale", 200)
    assert (await any_store.replay.sweep_and_peek(team.leader, 1, 0)).stale == 310


async def test_an_oversized_header_is_rejected_and_its_ticket_kept(any_store: Store) -> None:
    team = await start(any_store)
    await issue(any_store, team, 1)
    (held,) = await claim(any_store, "g")
    with pytest.raises(ValueError, match=r"is too large for a stream entry: .* the segments of a rollout"):
        await any_store.tickets.submit("g", held, flow.header(held, generator="g" * 2**20), flow.payload_bytes(held), 60)
    assert await submit(any_store, "g", held)


async def test_old_drops_are_forgotten_even_if_the_clock_goes_back(any_store: Store) -> None:
    team = await start(any_store, slots=20)
    drops, order = any_store.keys.drops, f"{any_store.keys.drops}:order"
    pipe: Any = any_store.client.pipeline(transaction=False)
    for row in range(10_000):  # written by a server whose clock was far ahead
        pipe.hset(drops, f"9-{row}", "4000000000000 stale")
        pipe.zadd(order, {f"9-{row}": 4_000_000_000_000 + row})
    await pipe.execute()
    await buffer(any_store, team, 2)
    await any_store.replay.sweep_and_peek(team.leader, 1, 0)
    assert await any_store.client.hlen(drops) == await any_store.client.zcard(order) == 10_000  # type: ignore[misc]
    kept = {name.decode() for name in await any_store.client.hkeys(drops)}  # type: ignore[misc]
    assert {"0-0", "0-1"} <= kept
    assert {"9-0", "9-1"} & kept == set()


async def test_fences_and_incarnations_grow_even_if_the_clock_goes_back(any_store: Store) -> None:
    await start(any_store)
    ahead = 9_000_000_000_000_000
    await any_store.client.hset(any_store.keys.run, mapping={"trainer_fence": ahead, "incarnation": 9_000_000_000})  # type: ignore[misc]
    trainer = await begin_restore(any_store)
    state = await any_store.run.state()
    assert state is not None
    assert (trainer, state.incarnation) == (ahead + 1, 9_000_000_001)


async def test_late_calls_do_not_overwrite_newer_ones(any_store: Store) -> None:
    team = await start(any_store, table=TableRules("prioritized"))
    await buffer(any_store, team, 2)
    call = any_store.connection.call
    assert await call("reweigh", team.trainer, 5, "0-0", 7.0) == 1
    assert await call("reweigh", team.trainer, 4, "0-0", 3.0) == 0
    assert await any_store.client.zscore(any_store.keys.replay_weight, "0-0") == 7.0
    assert await call("round", team.trainer, 5, 1, "pause", b"{}", "g:b", 1) == 1
    assert await call("round", team.trainer, 4, 1, "gather", b"{}", "g:b", 1) == 0
    assert await call("acknowledge", "g:b", 1, 9, "ready", "") == 1
    for _ in range(2):
        assert await call("acknowledge", "g:b", 1, 8, "present", "") == 1
    sync = await any_store.client.hgetall(any_store.keys.sync)  # type: ignore[misc]
    assert (sync[b"mark"].split(b" ")[2], sync[b"ack:g:b"], sync[b"answers"]) == (b"pause", b"ready ", b"1")
    trainer = await any_store.run.attach_trainer()
    assert await call("reweigh", trainer, 1, "0-0", 3.0) == 1, "each trainer has its own sequence"


async def test_a_retried_claim_gets_the_same_tickets(any_store: Store) -> None:
    team = await start(any_store)
    await issue(any_store, team, 6)
    args = ("g", 0, team.trainer, 60_000, 2, "0-0", 0, 16, "boot")
    first = await any_store.connection.call("claim", *args, 1, 0, 0)
    assert len(first) == 9
    assert await any_store.connection.call("claim", *args, 1, 0, 0) == first
    second = await any_store.connection.call("claim", *args, 2, 0, 0)
    assert second[1] != first[1]
    assert await any_store.connection.call("claim", *args, 1, 0, 0) == [b"0-0"], "a later claim was made"
    await any_store.connection.call("release", "g", second[1], second[2], 0)
    assert await any_store.connection.call("claim", *args, 2, 0, 0) == [second[0], *second[5:]], "what is still held"
    assert len(await any_store.connection.call("claim", *args[:-1], "another boot", 1, 0, 0)) == 9


async def test_a_repeated_request_takes_effect_once(any_store: Store) -> None:
    team = await start(any_store)
    call = any_store.connection.call
    await call("desire", "a", "paused:trainer", "keep by hand")
    await call("pause_failing", "c", "keep@1 because prompts fail", "1-1")
    await any_store.run.resume("trainer")
    await any_store.run.resume("dataprep")
    await call("desire", "a", "paused:trainer", "keep by hand")
    await call("pause_failing", "c", "keep@1 because prompts fail", "1-1")
    state = await any_store.run.state()
    assert state is not None
    assert state.paused == {}
    fence = int(await call("attach_trainer", "b"))
    newer = await any_store.run.attach_trainer()
    assert int(await call("attach_trainer", "b")) == fence
    assert (await any_store.run.state() or state).trainer_fence == newer
    assert fence > team.trainer


async def test_settling_twice_in_one_call_settles_once(any_store: Store) -> None:
    team = await start(any_store)
    await issue(any_store, team, 1)
    (held,) = await claim(any_store, "g")
    await submit(any_store, "g", held)
    (item,) = await any_store.replay.read_headers(team.leader, 5)
    assert await any_store.replay.settle(team.leader, [Settlement(item, "insert"), Settlement(item, "stale")]) == 1
    assert (await any_store.run.audit())["buffered"] == 1


async def test_submitting_twice_in_one_call_stores_one_header(any_store: Store) -> None:
    team = await start(any_store)
    await issue(any_store, team, 1)
    (held,) = await claim(any_store, "g")
    await any_store.client.set(any_store.keys.payload(held.payload), b"tokens", ex=60)
    args = ("g", held.entry, held.fence, held.ticket_id, b"header")
    assert await any_store.connection.call("submit", *args, *args) == [1, 1]
    assert (await any_store.run.audit())["headers"] == 1


async def test_a_superseded_trainer_cannot_reweigh(any_store: Store) -> None:
    team = await start(any_store, table=TableRules("prioritized"))
    await buffer(any_store, team, 1)
    await any_store.run.attach_trainer()
    with pytest.raises(Fenced):
        await any_store.replay.reweigh(team.trainer, {"0-0": 3.0})
    assert await any_store.client.zscore(any_store.keys.replay_weight, "0-0") == 1.0


async def test_a_late_pass_over_keeps_newer_drops(any_store: Store) -> None:
    team = await start(any_store)
    await issue(any_store, team, 2)
    first, second = await claim(any_store, "g", 2)
    await submit(any_store, "g", second)
    await settle(any_store, team, "filtered:zero")
    assert await any_store.connection.call("pass_over", team.leader, 5, 1) == 1
    await submit(any_store, "g", first)
    await settle(any_store, team, "filtered:zero")
    assert await any_store.connection.call("pass_over", team.leader, 5, 1) == 0
    assert (await any_store.replay.sweep_and_peek(team.leader, 0, 1)).gaps == (0,)


@pytest.mark.parametrize("weight", ["nan", "-1", "2e9"])
async def test_a_batch_with_an_invalid_weight_is_rejected(any_store: Store, weight: str) -> None:
    team = await start(any_store, table=TableRules("prioritized"))
    await issue(any_store, team, 2)
    for one in await claim(any_store, "g", 2):
        await submit(any_store, "g", one)
    good, bad = await any_store.replay.read_headers(team.leader, 2)
    settlements = [Settlement(good, "insert"), Settlement(bad, "insert", weight=float(weight))]
    with pytest.raises(StoreError, match="INVALID weight"):
        await any_store.replay.settle(team.leader, settlements)
    assert (await any_store.run.audit())["headers"] == 2
