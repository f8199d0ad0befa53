"""Evaluation rounds in Redis: admission, leases and fences. Each result counts once, and no key is left behind."""

from __future__ import annotations

import asyncio

import pytest

from services.protocol import codec
from services.protocol.errors import Fenced
from services.protocol.messages import Header, PodStatus
from services.store import Store
from services.store.records import Claim
from tests.support import flow
from tests.support.flow import Team, header, start
from tests.support.harness import ticket

TTL_S, LEASE_S = 60.0, 60.0


def pod_name(number: int) -> str:
    return f"generator-{number}"


def member(number: int) -> str:
    return f"{pod_name(number)}:boot"


async def beat(store: Store, number: int, world: int = 1, phase: str = "ready", kind: str = "generator") -> None:
    await store.fleet.beat(PodStatus(kind, f"generator-{number}", "boot", "here", 1, "", phase, 0, world, {}), TTL_S)


async def volunteer(
    store: Store, number: int, version: int = 0, most: int = 1, training: int = 0, ttl_s: float = TTL_S, lease_s: float = LEASE_S
) -> bool:
    fence = await flow.trainer_fence(store)
    return await store.evaluation.volunteer(member(number), version, fence, ttl_s, lease_s, most, training)


async def claim(
    store: Store, number: int, count: int = 10, version: int = 0, lease_s: float = LEASE_S, max_expiries: int = 3
) -> list[Claim]:
    return await flow.claim(store, pod_name(number), count, version, lease_s, max_expiries=max_expiries, evaluates=True)


async def open_round(store: Store, team: Team, version: int = 0, prompts: int = 3) -> list[str]:
    tickets = [ticket(i, id=f"held_out:{i}", version=version, source="held_out") for i in range(prompts)]
    assert await store.evaluation.open(team.leader, version, tickets)
    return [one.id for one in tickets]


def result(one: Claim, version: int = 0) -> Header:
    return header(one, version, payload="", payload_bytes=0, source="held_out")


async def submit(store: Store, name: str, one: Claim, version: int = 0) -> bool:
    return await store.tickets.submit(name, one, result(one, version), b"", 60)


async def round_keys(store: Store) -> list[bytes]:
    return [key async for key in store.client.scan_iter(f"{store.keys.prefix.replace('{', '[{]')}*:eval:*")]


async def test_a_round_is_reported_once_and_leaves_no_key(store: Store) -> None:
    store = store
    team = await start(store)
    names = await open_round(store, team)
    assert await volunteer(store, 0)
    claims = await claim(store, 0)
    assert [one.ticket_id for one in claims] == names, "claimed in the order of the round"
    assert await claim(store, 0) == []
    for one in claims:
        assert await submit(store, pod_name(0), one)
    seen = (await store.evaluation.state(TTL_S)).round
    assert seen is not None
    assert (seen.version, seen.total, seen.done, seen.fault) == (0, 3, 3, "")
    assert sorted(await store.evaluation.results()) == names
    assert await store.evaluation.report(team.leader, 0, {"eval/version": 0.0})
    assert not await store.evaluation.report(team.leader, 0, {"eval/version": 0.0}), "reported twice"
    assert [record for _, record in await store.evaluation.records()] == [{"eval/version": 0.0}]
    assert await round_keys(store) == []
    assert (await store.evaluation.state(TTL_S)).round is None


async def test_only_the_leader_opens_a_round_and_only_once(store: Store) -> None:
    team = await start(store)
    with pytest.raises(Fenced):
        await store.evaluation.open(team.leader - 1, 0, [])
    await open_round(store, team, 0)
    assert await store.evaluation.open(team.leader, 0, [ticket(9, id="other:9")]), "a repeated call finds it open"
    assert (await store.evaluation.state(TTL_S)).round.total == 3  # type: ignore[union-attr]
    assert not await store.evaluation.open(team.leader, 2, []), "another is open"
    with pytest.raises(Fenced):
        await store.evaluation.abandon(team.leader - 1, 0, "a zombie")
    assert await store.evaluation.abandon(team.leader, 0, "a test")
    assert not await store.evaluation.open(team.leader, 0, []), "version 0 was handled"
    state = await store.evaluation.state(TTL_S)
    assert (state.dealt_with, state.abandoned, state.round) == (0, "version 0: a test", None)
    assert await store.evaluation.skip(team.leader, 4, 2)
    assert not await store.evaluation.skip(team.leader, 4, 2)
    audit = await store.run.audit()
    assert (audit["ledger:evaluations_abandoned"], audit["ledger:evaluations_skipped"]) == (1, 2)
    assert await round_keys(store) == []


async def test_concurrent_volunteers_share_a_limited_number_of_seats(store: Store) -> None:
    team = await start(store)
    await open_round(store, team)
    for number in range(8):
        await beat(store, number)
    admitted = await asyncio.gather(*(volunteer(store, number, most=3, training=2) for number in range(8)))
    assert sum(admitted) == 3
    assert [await volunteer(store, number, most=3) for number in range(8)] == admitted, "a repeated call gets the same answer"


async def test_enough_generators_stay_for_training(store: Store) -> None:
    team = await start(store)
    await open_round(store, team)
    await beat(store, 0)
    await beat(store, 1)
    await beat(store, 2, world=0, phase="loading")
    await beat(store, 3, phase="draining")
    await beat(store, 4, kind="trainer")
    assert not await volunteer(store, 0, most=8, training=2), "loading and draining pods and a trainer do not generate"
    admitted = await asyncio.gather(*(volunteer(store, number, most=8, training=1) for number in (0, 1)))
    assert sum(admitted) == 1


async def test_no_generator_is_reserved_after_the_last_version(store: Store) -> None:
    team = await start(store, steps=7)
    await open_round(store, team, version=7)
    assert all([await volunteer(store, number, 7, most=1, training=5) for number in range(3)])


async def test_only_pods_with_the_version_are_admitted_while_work_is_left(store: Store) -> None:
    team = await start(store)
    assert not await volunteer(store, 0), "no round is open"
    await open_round(store, team, prompts=1)
    assert not await volunteer(store, 0, version=1)
    assert await volunteer(store, 0)
    assert await claim(store, 0)
    assert not await volunteer(store, 1, most=2), "nothing is left to claim"
    assert await volunteer(store, 0), "it holds a ticket"
    assert not await volunteer(store, 0, version=1), "its weights changed, so it no longer volunteers"
    assert await claim(store, 0, lease_s=0.0) == []
    await store.run.stop("a test")
    assert not await volunteer(store, 1, most=2)


async def test_a_lost_volunteer_is_replaced_and_its_tickets_reclaimed(store: Store) -> None:
    team = await start(store)
    (name,) = await open_round(store, team, prompts=1)
    await beat(store, 0)
    await beat(store, 1)
    assert await volunteer(store, 0)
    (lost,) = await claim(store, 0)
    assert not await volunteer(store, 1, lease_s=0.0)
    await store.fleet.leave(PodStatus("generator", "generator-0", "boot", "", 0, "", "", 0, 0, {}))
    assert await volunteer(store, 1, lease_s=0.0)
    (taken,) = await claim(store, 1, lease_s=0.0)
    assert taken.ticket_id == name
    assert not await submit(store, pod_name(0), lost), "a zombie's result counted"
    assert await store.tickets.renew(pod_name(0), [lost]) == {lost.entry}
    assert await submit(store, pod_name(1), taken)


async def test_a_result_sent_twice_counts_once(store: Store) -> None:
    team = await start(store)
    await open_round(store, team, prompts=1)
    await volunteer(store, 0)
    (one,) = await claim(store, 0)
    assert await submit(store, pod_name(0), one)
    assert await submit(store, pod_name(0), one), "the first reply may have been lost"
    assert not await submit(store, pod_name(0), one, 5), "another result of the same claim"
    seen = (await store.evaluation.state(TTL_S)).round
    assert seen is not None
    assert seen.done == 1
    (body,) = (await store.evaluation.results()).values()
    assert codec.decode(body, Header).oldest == [0] * 4, "the first result stands"
    assert await claim(store, 0) == []
    assert not await volunteer(store, 0), "nothing is left to do"


async def test_a_renewed_lease_holds_and_a_released_ticket_is_reclaimed(store: Store) -> None:
    team = await start(store)
    await open_round(store, team, prompts=2)
    await volunteer(store, 0, most=2)
    await volunteer(store, 1, most=2)
    first, second = await claim(store, 0)
    await asyncio.sleep(0.5)
    assert await store.tickets.renew(pod_name(0), [first]) == set()
    (expired,) = await claim(store, 1, lease_s=0.4)
    assert expired.ticket_id == second.ticket_id
    assert [await store.tickets.release(pod_name(0), one) for one in (first, second)] == [True, False]
    await store.evaluation.resign(member(0))
    assert await claim(store, 0) == []
    (returned,) = await claim(store, 1)
    assert returned.ticket_id == first.ticket_id, "a ticket that another pod had taken over was handed back"


async def test_a_pod_claims_the_tickets_of_its_kind(store: Store) -> None:
    """Training and evaluation, generators and environments: nobody gets another's ticket, and the audit counts training alone."""
    team = await start(store)
    await flow.issue(store, team, 1)
    tickets = [ticket(0, id="held_out:0", version=0, source="held_out"), ticket(1, id="agents:0", version=0, source="agents")]
    assert await store.evaluation.open(team.leader, 0, tickets, {"agents"})
    await volunteer(store, 0)

    async def taken(**kind: bool) -> list[str]:
        return [one.ticket_id for one in await flow.claim(store, pod_name(0), 9, **kind)]

    assert await taken() == ["0-0"]
    assert await taken(rollouts=True) == []
    assert await taken(evaluates=True) == ["held_out:0"]
    assert await taken(rollouts=True, evaluates=True) == ["agents:0"]
    audit = await store.run.audit()
    assert (audit["tickets"], audit["outstanding"], audit["slots_used"]) == (1, 1, 1)
    assert await store.evaluation.abandon(team.leader, 0, "a test")
    assert await store.client.hlen(store.keys.claims) == 1, "claims of a round end with it"


async def test_volunteers_stay_until_environments_finish(store: Store) -> None:
    team = await start(store)
    names = ["held_out:0", "agents:0", "agents:1"]
    tickets = [ticket(i, id=name, version=0, source=name.split(":")[0]) for i, name in enumerate(names)]
    assert await store.evaluation.open(team.leader, 0, tickets, {"agents"})
    first, other = "environment-0", "environment-1"

    async def ask(name: str, lease_s: float = LEASE_S, version: int = 0) -> list[Claim]:
        return await flow.claim(store, name, 1, version, lease_s, rollouts=True, evaluates=True)

    assert await volunteer(store, 0)
    (served,) = await claim(store, 0)
    assert served.ticket_id == "held_out:0"
    assert await submit(store, pod_name(0), served)
    (expired,) = await ask(first)
    (again,) = await ask(other, lease_s=0.0)
    (second,) = await ask(first)
    assert (expired.ticket_id, again.ticket_id, second.ticket_id) == ("agents:0", "agents:0", "agents:1")
    assert not await submit(store, first, expired), "its lease had expired"
    assert await store.tickets.renew(other, [again]) == set()
    assert await ask(first) == []
    assert await store.tickets.release(first, second)
    (second,) = await ask(first)
    assert await submit(store, other, again)
    assert await claim(store, 0) == []
    assert await volunteer(store, 0), "one of them has no result yet"
    await store.evaluation.resign(member(0))
    assert await volunteer(store, 0), "environments need a generator"
    assert await submit(store, first, second)
    assert not await volunteer(store, 0), "its work is done"
    assert await ask(first, version=1) == [], "no round of that version is open"
    assert sorted(await store.evaluation.results()) == sorted(names)
    assert await store.evaluation.report(team.leader, 0, {})
    assert await round_keys(store) == []


async def test_turns_of_a_round_end_with_it(store: Store) -> None:
    """A later round has tickets of the same names."""
    team = await start(store)
    assert await store.evaluation.open(team.leader, 0, [ticket(0, id="agents:0", version=0, source="agents")], {"agents"})
    (one,) = await flow.claim(store, "environment-0", rollouts=True, evaluates=True)
    assert await store.tickets.commit_turn("environment-0", one, flow.first_turn(), b"record", 60)
    assert await store.tickets.turns(one.ticket_id)
    assert await store.evaluation.abandon(team.leader, 0, "a test")
    assert not await store.tickets.turns(one.ticket_id)
    assert not await store.tickets.commit_turn("environment-0", one, flow.first_turn(), b"record", 60)


async def test_a_ticket_that_keeps_failing_ends_the_round_with_its_reason(store: Store) -> None:
    team = await start(store)
    await open_round(store, team, prompts=1)
    await volunteer(store, 0)
    for last in (False, False, True):
        (one,) = await claim(store, 0)
        assert await store.tickets.fail(pod_name(0), one, "verifier broke", max_attempts=3) is last
    seen = (await store.evaluation.state(TTL_S)).round
    assert seen is not None
    assert seen.fault == "ticket held_out:0: verifier broke"
    assert await claim(store, 0) == [], "a failed round hands out no more work"
    assert not await volunteer(store, 1, most=2)


async def test_a_ticket_that_kills_its_generators_ends_the_round(store: Store) -> None:
    team = await start(store)
    await open_round(store, team, prompts=1)
    await volunteer(store, 0)
    for _ in range(4):
        assert await claim(store, 0, lease_s=0.0)
    assert await claim(store, 0, lease_s=0.0) == []
    seen = (await store.evaluation.state(TTL_S)).round
    assert seen is not None
    assert "its lease expired 3 times" in seen.fault


async def test_a_pause_holds_tickets_and_keeps_the_volunteers(store: Store) -> None:
    team = await start(store)
    await open_round(store, team)
    await volunteer(store, 0)
    await store.run.pause("generator", "a test")
    assert await claim(store, 0) == []
    assert await volunteer(store, 0)
    await store.run.resume("generator")
    assert len(await claim(store, 0)) == 3
