"""Late, repeated and superseded calls are each judged by the current state."""

from __future__ import annotations

import time
from typing import Any

import pytest

from services.protocol.errors import Fenced, OutOfOrder, StoreError
from services.protocol.messages import PodStatus
from services.store import Store
from services.store.records import TableRules
from tests.store.test_evaluation import LEASE_S, claim, open_round, pod_name, round_keys, volunteer
from tests.support import flow
from tests.support.flow import start
from tests.support.harness import ticket

BOOT = "boot"


async def take_over(store: Store) -> flow.Team:
    """Let another leader and another trainer take over; return their fencing numbers."""
    await store.client.hset(store.keys.run, "leader_until_ms", "0")
    leader = await store.run.lead("leader-1:boot", 60.0)
    assert leader is not None
    return flow.Team(leader, await store.run.attach_trainer())


async def test_a_superseded_leader_cannot_skip_a_round(store: Store) -> None:
    team = await start(store)
    new = await take_over(store)
    with pytest.raises(Fenced):
        await store.evaluation.skip(team.leader, 3, 1)
    assert await store.evaluation.skip(new.leader, 3, 1)


async def test_a_failed_round_admits_no_volunteers(store: Store) -> None:
    team = await start(store)
    await open_round(store, team)
    assert await volunteer(store, 0)
    [first] = await claim(store, 0, 1)
    assert await store.tickets.fail(pod_name(0), first, "it cannot be answered", 1)
    assert not await volunteer(store, 1, most=2), "although two tickets wait"


async def test_a_repeated_evaluation_claim_returns_what_is_still_held(store: Store) -> None:
    team = await start(store)
    await open_round(store, team)
    await volunteer(store, 0)
    arguments = ("claim", pod_name(0), 0, 0, int(1000 * LEASE_S), 3, "0-0", 0, 3, BOOT, 7, 0, 1)
    first = await store.connection.call(*arguments)
    assert await store.connection.call(*arguments) == first
    done, lost, kept = (first[i : i + 4] for i in (1, 5, 9))
    assert await store.connection.call("submit", pod_name(0), done[0], done[1], done[2], b"header") == [1]
    await store.client.hset(store.keys.claims, lost[0], f"{pod_name(1)}|99")
    assert await store.connection.call(*arguments) == [first[0], *kept]


@pytest.mark.parametrize("ended", ["stop", "finish"])
async def test_evaluation_tickets_are_not_claimed_once_the_run_ends(store: Store, ended: str) -> None:
    team = await start(store)
    await open_round(store, team)
    assert await volunteer(store, 0)
    await (store.run.stop if ended == "stop" else store.run.finish)("enough")
    assert await claim(store, 0) == []


async def test_a_large_round_opens_atomically(store: Store) -> None:
    team = await start(store)
    tickets = [ticket(i, id=f"held_out:{i}", source="held_out") for i in range(4500)]
    assert await store.evaluation.open(team.leader, 0, tickets)
    assert await store.client.xlen(store.keys.evaluation("tickets")) == 4500
    assert await store.evaluation.abandon(team.leader, 0, "a test")
    assert await round_keys(store) == []


async def test_a_superseded_trainer_cannot_take_a_snapshot(store: Store) -> None:
    team = await start(store)
    new = await take_over(store)
    await store.connection.call("snapshot_begin", new.trainer, 1, 60_000)
    for function, *arguments in (("snapshot_begin", 2, 60_000), ("snapshot_hold", 1, 60_000), ("snapshot_end", 1)):
        with pytest.raises(Fenced):
            await store.connection.call(str(function), team.trainer, *arguments)
    assert await store.connection.call("snapshot_end", new.trainer, 1) == 1


async def test_an_ended_snapshot_cannot_begin_again(store: Store) -> None:
    team = await start(store)
    for token in (1, 2):
        await store.connection.call("snapshot_begin", team.trainer, token, 60_000)
    with pytest.raises(OutOfOrder, match="snapshot 1 has ended"):
        await store.connection.call("snapshot_begin", team.trainer, 1, 60_000)
    assert await store.client.hget(store.keys.run, "frozen_by") == b"2"


async def test_an_expired_snapshot_lease_cannot_be_renewed(store: Store) -> None:
    team = await start(store)
    await store.connection.call("snapshot_begin", team.trainer, 1, 0)
    assert await store.connection.call("snapshot_hold", team.trainer, 1, 60_000) == 0
    assert await store.connection.call("snapshot_end", team.trainer, 1) == 0


async def test_an_abandoned_snapshot_blocks_nothing_and_is_forgotten(store: Store) -> None:
    team = await start(store)
    await store.connection.call("snapshot_begin", team.trainer, 1, 0)
    assert await flow.issue(store, team, 1) == 1
    assert await store.client.hmget(store.keys.run, "frozen_by", "frozen_until_ms") == [None, None]


async def test_a_restore_ends_the_round_and_starts_a_new_incarnation(store: Store) -> None:
    team = await start(store)
    await open_round(store, team)
    assert await round_keys(store)
    await store.client.hset(store.keys.run, "incarnation", "7")  # like the first run on an empty server
    before = time.time()
    await store.connection.call("restore_begin", team.trainer, 0)
    assert await round_keys(store) == []
    assert int(await store.client.hget(store.keys.run, "incarnation") or 0) >= int(before) - 1


@pytest.mark.parametrize(
    "words",
    [("x", "XDEL", "{}:a"), ("1", "XDEL"), ("4", "SET", "{}:kept", "y"), ("0",), ("-1", "SET", "{}:kept", "y"), ("2", "XDEL")],
    ids=["no number", "no key", "too few words", "none", "negative", "no word"],
)
async def test_an_incomplete_piece_of_a_restore_writes_nothing(store: Store, words: tuple[str, ...]) -> None:
    team = await start(store)
    await store.connection.call("restore_begin", team.trainer, 0)
    kept = f"{store.keys.prefix}:kept"
    await store.client.set(kept, "x")
    given = [word.format(store.keys.prefix) for word in words]
    with pytest.raises(StoreError, match="INVALID commands of piece 1"):
        await store.connection.call("restore_write", team.trainer, 0, 1, *given)
    assert await store.client.get(kept) == b"x"
    assert await store.client.hget(store.keys.run, "restored_pieces") == b"0"


async def test_only_the_restoring_trainer_may_repeat_the_end(store: Store) -> None:
    team = await start(store)
    await store.connection.call("restore_begin", team.trainer, 0)
    assert await store.connection.call("restore_end", team.trainer, 0) == 1
    assert await store.connection.call("restore_end", team.trainer, 0) == 0
    next_trainer = await store.run.attach_trainer()
    with pytest.raises(OutOfOrder, match="no restore to step 0"):
        await store.connection.call("restore_end", next_trainer, 0)


def pod(phase: str = "ready", name: str = "generator-0") -> PodStatus:
    return PodStatus("generator", name, BOOT, "here", 1, "", phase, 0, 1, {})


async def test_a_draining_pod_is_not_counted_as_a_claimer(store: Store) -> None:
    assert await store.fleet.beat(pod(), 60.0) == 1
    assert await store.fleet.beat(pod("draining"), 60.0) == 0
    assert await store.fleet.beat(pod("draining", "generator-1"), 60.0) == 0


async def test_a_retried_claim_is_answered_after_a_heartbeat(store: Store) -> None:
    team = await start(store)
    await flow.issue(store, team, 2)
    await store.fleet.beat(pod(), 60.0)
    fence = await flow.trainer_fence(store)
    arguments: tuple[Any, ...] = ("claim", "generator-0", 0, fence, 60_000, 1, "0-0", 0, 16, BOOT, 5, 0, 0)
    first = await store.connection.call(*arguments)
    await store.fleet.beat(pod(), 60.0)
    assert await store.connection.call(*arguments) == first, "and no second ticket is claimed"


async def test_a_pod_may_leave_a_missing_run(store: Store) -> None:
    await store.fleet.leave(pod())
    assert await store.fleet.members(60.0) == []


async def test_the_clock_of_a_run_never_goes_back(store: Store) -> None:
    team = await start(store)
    ahead = int(1000 * time.time()) + 10_000_000
    await store.client.hset(store.keys.run, "clock_ms", str(ahead))
    await open_round(store, team)
    assert int(await store.client.hget(store.keys.evaluation("round"), "opened_ms") or 0) == ahead


async def test_logged_step_and_tracker_lease_never_go_back(store: Store) -> None:
    await start(store, table=TableRules())
    state = store.keys.samples_state
    await store.samples.log(2, 5, 1.0, 100.0)
    until = int(await store.client.hget(state, "until_ms") or 0)
    for incarnation, step in ((2, 3), (1, 9)):
        await store.samples.log(incarnation, step, 1.0, 0.0)
        assert await store.client.hmget(state, "logged_in", "logged") == [b"2", b"5"]
    assert int(await store.client.hget(state, "until_ms") or 0) == until
    await store.samples.log(3, 1, 1.0, 200.0)
    assert await store.client.hmget(state, "logged_in", "logged") == [b"3", b"1"]
    assert int(await store.client.hget(state, "until_ms") or 0) > until


async def test_logged_samples_are_removed_and_free_their_bytes(store: Store) -> None:
    team = await start(store)
    run = await store.run.state()
    assert run is not None
    await store.samples.log(run.incarnation, -1, 1.0, 60.0)
    await flow.issue(store, team, 2)
    for one in await flow.claim(store, "g", 2):
        assert await flow.submit(store, "g", one)
    await flow.settle(store, team, "filtered:zero")
    entries = [one.entry for one in await store.samples.waiting(10)]
    kept: Any = await store.client.xrange(store.keys.samples)
    sizes = [int(fields[b"size"]) for _, fields in kept]
    assert await store.samples.log(run.incarnation, -1, 1.0, 60.0, entries[:1]) == 1
    assert [one.entry for one in await store.samples.waiting(10)] == entries[1:]
    assert int(await store.client.hget(store.keys.samples_state, "bytes") or 0) == sizes[1]
