"""Tickets are issued into free slots, claimed under a lease with a fencing number, and submitted once."""

from __future__ import annotations

import asyncio

import pytest

from services.protocol.errors import Fenced
from services.store import Store
from tests.support import flow
from tests.support.flow import claim, counts, header, issue, payload_bytes, settle, start, submit
from tests.support.harness import buried, ticket, wait_until


async def test_issue_fills_only_free_slots_and_is_idempotent(store: Store) -> None:
    team = await start(store, slots=3)
    tickets = [ticket(seq) for seq in range(5)]
    assert await store.tickets.issue(team.leader, 0, tickets) == 0, "all or none"
    assert await store.tickets.issue(team.leader, 0, tickets[:3], b"the order", {"main": b"rows"}) == 3
    assert await store.tickets.order() == (b"the order", {"main": b"rows"})
    assert await store.tickets.issue(team.leader, 0, tickets) == 0, "the cursor has moved on"
    assert await store.tickets.issue(team.leader, 3, tickets[3:]) == 0, "no slot is free"
    assert await counts(store) == {
        "tickets": 3, "outstanding": 3, "slots_used": 3, "ledger:issued": 3, "ledger:syncs": 1,
    }  # fmt: skip


async def test_only_the_leader_issues(store: Store) -> None:
    team = await start(store)
    await store.run.step_down("leader-0:boot")
    assert await store.run.lead("leader-1:boot", 60.0)
    with pytest.raises(Fenced):
        await store.tickets.issue(team.leader, 0, [ticket(0)])


async def test_a_claim_carries_the_ticket_and_an_increasing_fence(store: Store) -> None:
    team = await start(store)
    await issue(store, team, 3)
    first, second = await claim(store, "a", 2)
    (third,) = await claim(store, "b", 2)
    assert [c.ticket for c in (first, second, third)] == [ticket(0), ticket(1), ticket(2)]
    assert first.fence < second.fence < third.fence
    assert await claim(store, "b", 2) == []


@pytest.mark.parametrize("version", [-1, 1])
async def test_only_pods_with_the_published_version_claim(store: Store, version: int) -> None:
    team = await start(store)
    await issue(store, team, 1)
    assert await claim(store, "a", version=version) == []


async def test_nothing_is_claimed_while_paused_or_ended(store: Store) -> None:
    team = await start(store)
    await issue(store, team, 2)
    await store.run.pause("generator", "a test")
    assert await claim(store, "a") == []
    await store.run.resume("generator")
    assert len(await claim(store, "a")) == 1
    await store.run.finish("done")
    assert await claim(store, "a") == []


async def test_an_expired_lease_is_reclaimed_and_a_late_submit_rejected(store: Store) -> None:
    team = await start(store)
    await issue(store, team, 1)
    (dead,) = await claim(store, "dead")
    (alive,) = await claim(store, "alive", lease_s=0.0)
    assert (alive.entry, alive.ticket_id) == (dead.entry, dead.ticket_id)
    assert alive.fence > dead.fence
    assert alive.payload != dead.payload
    assert await store.tickets.renew("dead", [dead]) == {dead.entry}
    assert not await submit(store, "dead", dead)
    assert await store.client.exists(store.keys.payload(dead.payload)) == 0, "the rejected payload is deleted at once"
    assert await submit(store, "alive", alive)
    audit = await store.run.audit()
    assert (audit["headers"], audit["tickets"], audit["ledger:refused_submits"]) == (1, 0, 1)


async def test_a_renewed_lease_does_not_expire(store: Store) -> None:
    team = await start(store)
    await issue(store, team, 1)
    held = await claim(store, "a")
    for _ in range(5):
        await asyncio.sleep(0.25)
        assert await store.tickets.renew("a", held) == set()
        assert await claim(store, "b", lease_s=1.0) == []


async def test_a_repeated_submission_is_accepted_and_stored_once(store: Store) -> None:
    team = await start(store)
    await issue(store, team, 1)
    (one,) = await claim(store, "a")
    assert await submit(store, "a", one)
    assert await submit(store, "a", one), "as the client retries after a lost reply"
    audit = await store.run.audit()
    assert (audit["headers"], audit.get("ledger:refused_submits", 0)) == (1, 0)
    assert await store.client.ttl(store.keys.payload(one.payload)) == -1


async def test_resubmitting_a_dropped_group_leaves_no_payload(store: Store) -> None:
    team = await start(store)
    await issue(store, team, 1)
    (one,) = await claim(store, "a")
    assert await submit(store, "a", one)
    assert await settle(store, team, "stale") == 1
    assert not await submit(store, "a", one)
    assert await store.client.exists(store.keys.payload(one.payload)) == 0


async def test_concurrent_submissions_are_batched_and_judged_separately(store: Store) -> None:
    team = await start(store, slots=40)
    await issue(store, team, 40)
    claims = await claim(store, "a", 40)
    lost = {one.entry for one in await claim(store, "b", 5, lease_s=0.0)}
    before = (await store.client.info("commandstats"))["cmdstat_fcall"]["calls"]
    accepted = await asyncio.gather(*(submit(store, "a", one) for one in claims))
    assert accepted == [one.entry not in lost for one in claims]
    assert (await store.client.info("commandstats"))["cmdstat_fcall"]["calls"] - before == 3
    assert await settle(store, team) == 35


async def test_an_unencodable_submission_fails_alone(store: Store) -> None:
    team = await start(store)
    await issue(store, team, 2)
    good, bad = await claim(store, "a", 2)
    broken = store.tickets.submit("a", bad, header(bad, rewards=[1j]), payload_bytes(bad), flow.TTL_S)
    outcomes = await asyncio.gather(submit(store, "a", good), broken, return_exceptions=True)
    assert outcomes[0] is True
    assert isinstance(outcomes[1], TypeError)


async def test_a_released_ticket_is_reclaimable_and_not_expired(store: Store) -> None:
    team = await start(store)
    await issue(store, team, 1)
    for round in range(3):
        (one,) = await claim(store, f"g{round % 2}", max_expiries=0)
        assert await store.tickets.release(f"g{round % 2}", one)
        assert not await store.tickets.release(f"g{round % 2}", one), "no longer held"
    assert (await store.run.audit())["tickets"] == 1


async def test_partial_tokens_pass_to_the_next_claim_until_submitted(store: Store) -> None:
    team = await start(store)
    await issue(store, team, 1)
    (one,) = await claim(store, "a")
    assert await store.tickets.save_partial("a", one, b"tokens", flow.TTL_S)
    await store.tickets.release("a", one)
    assert not await store.tickets.save_partial("a", one, b"late", flow.TTL_S)
    (two,) = await claim(store, "b")
    assert await store.tickets.load_partial(two.ticket_id) == b"tokens"
    assert await submit(store, "b", two)
    assert await store.tickets.load_partial(two.ticket_id) is None


async def test_a_ticket_that_fails_too_often_is_dead_lettered(store: Store) -> None:
    team = await start(store)
    await issue(store, team, 1)
    for attempt in (1, 2, 3):
        (one,) = await claim(store, "a")
        assert await store.tickets.fail("a", one, f"verifier broke, {attempt}", max_attempts=3) is (attempt == 3)
        assert not await store.tickets.fail("a", one, "again", max_attempts=3), "a repeated call has no second effect"
    assert await buried(store) == [("0-0", "verifier broke, 3")]
    assert await counts(store) == {"ledger:issued": 1, "ledger:failed": 1, "ledger:syncs": 1}


async def test_a_ticket_whose_leases_keep_expiring_is_dead_lettered(store: Store) -> None:
    team = await start(store)
    await issue(store, team, 1)
    for _ in range(3):
        assert len(await claim(store, "a", lease_s=0.0, max_expiries=2)) == 1
    assert await claim(store, "a", lease_s=0.0, max_expiries=2) == []
    assert await buried(store) == [("0-0", "its lease expired 2 times: it may crash its generator")]


async def test_a_ticket_that_keeps_killing_its_generator_is_dead_lettered(store: Store) -> None:
    """A restarted pod adopts its pending tickets before their leases expire, which also counts as an expired lease."""
    team = await start(store)
    await issue(store, team, 1)
    for _ in range(3):
        assert len(await claim(store, "a", adopt=True, max_expiries=2)) == 1
    assert await claim(store, "a", adopt=True, max_expiries=2) == []
    assert (await store.run.audit())["ledger:failed"] == 1


async def test_a_restarted_pod_adopts_its_tickets_and_fences_off_the_old(store: Store) -> None:
    team = await start(store)
    await issue(store, team, 2)
    old = await claim(store, "a", 2)
    new = await claim(store, "a", 2, adopt=True)
    assert [c.entry for c in new] == [c.entry for c in old]
    assert not await submit(store, "a", old[0])
    assert await submit(store, "a", new[0])


async def test_an_adopted_ticket_is_counted_once_per_call(store: Store) -> None:
    """The ticket is the pod's own and, with a lease of 0 s, also expired: a call assigns one fence and counts one expiry."""
    team = await start(store)
    await issue(store, team, 1)
    await claim(store, "a")
    assert len(await claim(store, "a", 5, lease_s=0.0, adopt=True, max_expiries=1)) == 1
    assert await claim(store, "a", 5, lease_s=0.0, adopt=True, max_expiries=1) == []
    assert await counts(store) == {"ledger:issued": 1, "ledger:failed": 1, "ledger:syncs": 1}


async def test_claims_walk_through_all_expired_leases(store: Store) -> None:
    team = await start(store, slots=50)
    await issue(store, team, 50)
    assert len(await claim(store, "dead", 50)) == 50
    scan, seen = "0-0", []
    for _ in range(20):
        scan, claims = await store.tickets.claim("alive", 0, await flow.trainer_fence(store), 0.0, 3, scan)
        seen += [c.ticket_id for c in claims]
    assert set(seen) == {f"0-{i}" for i in range(50)}


async def test_a_corrupt_ticket_is_claimed_without_a_body(store: Store) -> None:
    await start(store)
    await store.client.xadd(store.keys.tickets, {"ticket": "0-9", "body": b"\xc1garbage"})
    await store.client.xadd(store.keys.tickets, {"ticket": "0-10"})
    bad = await claim(store, "a", 3)
    assert [(c.ticket_id, c.ticket) for c in bad] == [("0-9", None), ("0-10", None)]
    for one in bad:
        assert await store.tickets.fail("a", one, "its bytes are not a ticket", max_attempts=1)
    assert [ticket for ticket, _ in await buried(store)] == ["0-10", "0-9"]
    assert await counts(store) == {"ledger:unknown_tickets": 2, "ledger:syncs": 1}, "they were never issued: no slot is freed"


async def test_a_reason_with_a_lone_surrogate_is_reported(store: Store) -> None:
    team = await start(store)
    await issue(store, team, 1)
    [held] = await claim(store, "g")
    assert await store.tickets.fail("g", held, "the policy wrote \ud800", 1)
    assert await buried(store) == [(held.ticket_id, "the policy wrote ?")]


@pytest.mark.parametrize("rollouts", [False, True], ids=["generators", "environments"])
async def test_the_oldest_ticket_has_an_age_until_it_is_submitted(store: Store, rollouts: bool) -> None:
    team = await start(store)
    assert (await store.monitor.sizes()).oldest_ticket_s == 0.0
    await store.tickets.issue(team.leader, 0, [ticket(0)], environments={"main"} if rollouts else ())
    [held] = await claim(store, "a", rollouts=rollouts)

    async def aged() -> bool:
        return 0.05 < (await store.monitor.sizes()).oldest_ticket_s < 60

    await wait_until(aged)
    assert await issue(store, team, 1) == 1
    assert await aged(), "the newer one does not count"
    assert await submit(store, "a", held)
    assert (await store.monitor.sizes()).oldest_ticket_s < 60
