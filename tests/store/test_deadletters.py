"""Dead letters and requeueing: a failed ticket can be reissued once, and only if it is nowhere else."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path

import pytest

from services.operations.inspection.ledger import audit
from services.store import Store
from services.store.deadletters import Requeued
from services.store.inspection import Drop
from services.store.snapshot_format import Snapshot
from tests.support import flow
from tests.support.flow import buffer, claim, counts, header, issue, payload_bytes, prepare, settle, start, submit
from tests.support.harness import ticket


async def bury(store: Store, team: flow.Team, reason: str = "verifier broke") -> str:
    """Issue a ticket and let it fail permanently; return its dead letter."""
    assert await issue(store, team, 1) == 1
    (one,) = await claim(store, "g")
    assert await store.tickets.fail("g", one, reason, max_attempts=1)
    return (await store.dead_letters.page(1))[0].id


async def write_letter(store: Store, **fields: str | bytes) -> str:
    """Write a dead letter with arbitrary fields, bypassing the functions; return its id."""
    return (await store.client.xadd(store.keys.deadletter, fields)).decode()  # type: ignore[arg-type]


async def test_a_requeued_ticket_waits_and_its_letter_is_gone(store: Store) -> None:
    team = await start(store)
    id = await bury(store, team)
    assert await counts(store) == {"ledger:issued": 1, "ledger:failed": 1, "ledger:syncs": 1}
    (answer,) = await store.dead_letters.requeue([id])
    assert (answer.id, answer.ticket, answer.refusal) == (id, "0-0", "")
    assert await counts(store) == {"ledger:issued": 1, "requeued": 1, "ledger:syncs": 1}
    assert await store.dead_letters.page() == []
    report = await audit(store)
    assert report.ok, report.messages
    found = await store.inspection.whereabouts("0-0")
    assert (found.requeued, found.drop) == (True, None)


async def test_a_requeued_ticket_is_issued_generated_and_counted_once(store: Store) -> None:
    team = await start(store)
    await store.dead_letters.requeue([await bury(store, team)])
    state = await store.run.state()
    assert state is not None
    again = ticket(state.cursor, id="0-0", index=0)
    assert await store.tickets.issue(team.leader, state.cursor, [again], requeued=1) == 1
    (one,) = await claim(store, "g")
    assert one.ticket_id == "0-0"
    assert await submit(store, "g", one)
    assert await settle(store, team) == 1
    assert await counts(store) == {"ledger:issued": 1, "buffered": 1, "slots_used": 1, "ledger:syncs": 1}


async def test_failures_in_a_row_are_those_since_the_last_scored_group(store: Store, tmp_path: Path) -> None:
    team = await start(store)
    first = await bury(store, team)
    assert await store.dead_letters.in_a_row() == [first]
    assert await issue(store, team, 1) == 1
    (one,) = await claim(store, "g")
    assert await submit(store, "g", one)
    assert await settle(store, team) == 1
    assert await store.dead_letters.in_a_row() == []
    later = [await bury(store, team) for _ in range(3)]
    assert await store.dead_letters.in_a_row() == later
    await store.dead_letters.requeue([first, later[1]])
    assert await store.dead_letters.in_a_row() == [later[0], later[2]]
    assert await issue(store, team, 1) == 1
    (one,) = await claim(store, "g")
    await store.run.pause_failing("2 in a row", later[2])
    assert await submit(store, "g", one)
    assert await settle(store, team) == 1
    assert await store.dead_letters.in_a_row() == [later[0], later[2]], "the run has paused for these"
    assert await store.dead_letters.in_a_row(since_pause=True) == []
    last = await bury(store, team)
    assert await store.dead_letters.in_a_row(since_pause=True) == [last]
    await store.snapshots.save(team.trainer, -1, tmp_path / "snapshot", True)
    await store.client.hdel(store.keys.run, "letter_before", "letter_paused")  # type: ignore[misc]
    await store.restores.restore(team.trainer, Snapshot(tmp_path / "snapshot"), True, lambda: None)
    assert await store.dead_letters.in_a_row() == [later[0], later[2], last]
    assert await store.dead_letters.in_a_row(since_pause=True) == [last], "a checkpoint has the marks"


async def test_a_repeated_requeue_changes_nothing(store: Store) -> None:
    team = await start(store)
    id = await bury(store, team)
    await store.dead_letters.requeue([id])
    before = await store.run.audit()
    assert await store.dead_letters.requeue([id, "7-7"]) == [
        Requeued(id, "0-0", "", before=True),
        Requeued("7-7", "", "there is no such dead letter: it was requeued long ago, or trimmed", before=False),
    ]
    assert await store.run.audit() == before
    state = await store.run.state()
    assert state is not None
    again = ticket(state.cursor, id="0-0", index=0)
    assert await store.tickets.issue(team.leader, state.cursor, [again, ticket(state.cursor + 1)], requeued=2) == 0
    assert await store.tickets.issue(team.leader, state.cursor, [again], requeued=1) == 1
    before = await store.run.audit()
    assert await store.dead_letters.requeue([id]) == [Requeued(id, "0-0", "", before=True)]
    assert await store.run.audit() == before


async def test_the_history_of_requeued_letters_is_bounded(store: Store) -> None:
    """It keeps the last 10,000, ordered by when they were requeued, not by the age of their letters."""
    team = await start(store)
    letters = f"{store.keys.requeued}:letters"
    await store.client.hset(letters, mapping={f"{i}-9": f"9-{i}" for i in range(10_000)})  # type: ignore[misc]
    await store.client.zadd(f"{letters}:order", {f"{i}-9": 10_000 - i for i in range(10_000)})
    id = await bury(store, team)
    await store.dead_letters.requeue([id])
    gone, kept, last = await store.dead_letters.requeue(["9999-9", "0-9", id])
    assert (gone.before, kept.before, kept.ticket, last.before) == (False, True, "9-0", True)
    assert await store.client.hlen(letters) == 10_000  # type: ignore[misc]


async def test_requeueing_is_no_slower_with_many_waiting(store: Store) -> None:
    await start(store)

    async def least_s() -> float:
        """Return the shortest of several attempts, because the machine may be shared."""
        spent_s = []
        for _ in range(8):
            ids = [await write_letter(store, ticket=f"0-{next(row)}", outcome="failed") for _ in range(100)]
            began = time.perf_counter()
            assert not any(answer.refusal for answer in await store.dead_letters.requeue(ids))
            spent_s.append(time.perf_counter() - began)
        return min(spent_s)

    row = count()
    alone_s = await least_s()
    async with store.client.pipeline(transaction=False) as pipe:
        for first in range(0, 100_000, 1000):
            pipe.zadd(store.keys.requeued, {f"1-{first + i}": first + i - 100_000 for i in range(1000)})
        await pipe.execute()
    crowded_s = await least_s()
    assert crowded_s < 10 * alone_s  # scanning the waiting tickets would take hundreds of times as long
    assert await store.tickets.requeued(2) == ["1-0", "1-1"]
    assert (await store.tickets.requeued(200_000))[-1] == f"0-{next(row) - 1}"


async def test_requeueing_notifies_the_leader(store: Store) -> None:
    team = await start(store)
    id = await bury(store, team)
    async with store.monitor.listening() as notifications:
        notifications.add("slots")
        heard = aiter(notifications)
        assert await anext(heard) == "slots", "it is subscribed to"
        await store.dead_letters.requeue([id])
        assert await anext(heard) == "slots"


@pytest.mark.parametrize("id", ["", "0-0", "5", "-", "+", "abc", "1-2-3", "99999999999999999999999-0", "(0-0", "\x00"])
async def test_an_invalid_id_is_rejected_without_side_effects(store: Store, id: str) -> None:
    await start(store)
    await write_letter(store, ticket="0-5", reason="a", body="b", outcome="failed")
    (answer,) = await store.dead_letters.requeue([id])
    assert "there is no such dead letter" in answer.refusal
    assert await store.dead_letters.count() == 1


async def test_letters_of_unknown_tickets_are_not_requeued(store: Store) -> None:
    await start(store)
    await store.client.xadd(store.keys.tickets, {"ticket": "0-9", "body": "no ticket"})
    (one,) = await claim(store, "g")
    assert await store.tickets.fail("g", one, "its bytes are not a ticket", max_attempts=1)
    (letter,) = await store.dead_letters.page()
    assert not letter.failed
    (answer,) = await store.dead_letters.requeue([letter.id])
    assert "never counted as failed" in answer.refusal
    assert await store.dead_letters.page() == [letter]
    assert (await store.inspection.whereabouts("0-9")).drop is None


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"ticket": "0-0"}, "never counted as failed"),
        ({"ticket": "zero", "outcome": "failed"}, "not of the form <epoch>-<row>"),
        ({"outcome": "failed"}, "not of the form <epoch>-<row>"),
        ({"ticket": "0-99999999999", "outcome": "failed"}, "not of the form <epoch>-<row>"),
        ({"ticket": "0-4", "outcome": "failed"}, "under way again"),
        ({"ticket": "0-0", "outcome": "failed"}, "in the replay table or in a step"),
        ({"ticket": "0-1", "outcome": "failed"}, "in the replay table or in a step"),
        ({"ticket": "0-2", "outcome": "failed"}, "its prompt was trained"),
        ({"ticket": "0-3", "outcome": "failed"}, "waits to be issued again already"),
    ],
)
async def test_a_live_or_trained_ticket_is_not_requeued(store: Store, fields: dict[str, str], refusal: str) -> None:
    """0-0 is in the table, 0-1 in a prepared step, 0-2 was trained and retired, 0-3 is requeued, 0-4 is being generated."""
    team = await start(store)
    await buffer(store, team, 3)
    await prepare(store, team, 0, ["0-2"])
    await store.steps.commit(team.trainer, 0)
    await store.steps.publish(team.trainer, 1)
    await store.steps.checkpointed(team.trainer, 0)
    assert await store.steps.retire() == 1
    await prepare(store, team, 1, ["0-1"])
    await issue(store, team, 1)
    (one,) = await claim(store, "g", version=1)
    await store.tickets.fail("g", one, "verifier broke", max_attempts=1)
    await store.dead_letters.requeue([(await store.dead_letters.page(1))[0].id])
    await issue(store, team, 1)
    before = await store.run.audit()
    id = await write_letter(store, reason="a stray copy", body="", **fields)
    (answer,) = await store.dead_letters.requeue([id])
    assert refusal in answer.refusal
    assert (await store.dead_letters.get(id)) is not None
    assert await store.run.audit() == before


@pytest.mark.parametrize("end", ["stop", "finish"])
async def test_a_finished_run_rejects_requeueing(store: Store, end: str) -> None:
    team = await start(store)
    id = await bury(store, team)
    await getattr(store.run, end)("trained 4 of 4 steps")
    assert [answer.refusal for answer in await store.dead_letters.requeue([id, "7-7"])] == [
        "the run is over: trained 4 of 4 steps"
    ] * 2
    assert (await store.run.audit())["ledger:failed"] == 1


@pytest.mark.parametrize("end", ["stop", "finish"])
async def test_a_finished_run_still_reports_what_was_requeued(store: Store, end: str) -> None:
    id = await bury(store, await start(store))
    await store.dead_letters.requeue([id])
    await getattr(store.run, end)("trained 4 of 4 steps")
    assert await store.dead_letters.requeue([id]) == [Requeued(id, "0-0", "", before=True)]


async def test_many_letters_are_requeued_in_batches(store: Store) -> None:
    team = await start(store, slots=600)
    await issue(store, team, 600)
    for one in await claim(store, "g", 600):
        await store.tickets.fail("g", one, "a bad day", max_attempts=1)
    ids = [letter.id for letter in await store.dead_letters.page(1000)]
    answers = await store.dead_letters.requeue([*ids, "0-0"])
    assert [answer.refusal for answer in answers[:-1]] == [""] * 600
    assert answers[-1].refusal
    assert await counts(store) == {"ledger:issued": 600, "requeued": 600, "ledger:syncs": 1}


async def test_dead_letters_are_paged_newest_first(store: Store) -> None:
    await start(store)
    ids = [await write_letter(store, ticket=f"0-{i}", reason=f"reason {i}", body="b") for i in range(5)]
    first = await store.dead_letters.page(2)
    assert [letter.id for letter in first] == [ids[4], ids[3]]
    assert [letter.reason for letter in await store.dead_letters.page(9, first[-1].id)] == [
        "reason 2",
        "reason 1",
        "reason 0",
    ]
    assert await store.dead_letters.get(ids[0]) == (await store.dead_letters.page(9))[-1]


async def test_dropped_tickets_are_remembered_with_their_outcome(store: Store) -> None:
    team = await start(store)
    await issue(store, team, 3)
    one, two, three = await claim(store, "g", 3)
    assert await submit(store, "g", one)
    await settle(store, team, "filtered:zero")
    bad = header(two, rewards=[float("nan")] * flow.GROUP_SIZE)
    assert await store.tickets.submit("g", two, bad, payload_bytes(two), flow.TTL_S)
    await settle(store, team, "failed:rewards are not finite")
    assert await submit(store, "g", three)
    await settle(store, team, "stale")
    drops = [(await store.inspection.whereabouts(f"0-{i}")).drop for i in range(3)]
    assert all(drops)
    assert [drop.outcome for drop in drops if drop] == ["filtered:zero", "failed", "stale"]
    (letter,) = await store.dead_letters.page()
    assert letter.failed
    assert drops[1] == Drop("failed", letter.id, drops[1].at_s if drops[1] else 0.0)


async def test_the_history_of_drops_is_bounded(store: Store) -> None:
    """It keeps the latest 10,000."""
    team = await start(store, slots=20_000)
    async with store.client.pipeline(transaction=False) as pipe:
        pipe.hset(store.keys.drops, mapping={f"9-{i}": f"{i} stale" for i in range(10_000)})
        pipe.zadd(f"{store.keys.drops}:order", {f"9-{i}": i for i in range(10_000)})
        await pipe.execute()
    await bury(store, team)
    assert await store.client.hlen(store.keys.drops) == 10_000  # type: ignore[misc]
    assert (await store.inspection.whereabouts("9-0")).drop is None
    assert (await store.inspection.whereabouts("9-1")).drop == Drop("stale", "", 0.001)
    assert (await store.inspection.whereabouts("0-0")).drop is not None
