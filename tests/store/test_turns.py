"""Each turn of a rollout is stored once, in order, and only if it comes from the current holder of the ticket."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from services.protocol.errors import OutOfOrder
from services.store import Claim, Store
from services.store.tickets import TurnPlace
from tests.support.flow import claim, start
from tests.support.harness import ticket

POD = "environment-0"
TTL_S = 60


async def held(store: Store, count: int = 1, lease_s: float = 60.0) -> list[Claim]:
    """Issue tickets for environments and claim them."""
    team = await start(store)
    assert await store.tickets.issue(team.leader, 0, [ticket(row) for row in range(count)], b"", {}, 0, {"main"}) == count
    return await claim(store, POD, count, lease_s=lease_s, rollouts=True)


async def commit(store: Store, one: Claim, sample: int, restarts: int, place: int, record: bytes, pod: str = POD) -> bool:
    return await store.tickets.commit_turn(pod, one, TurnPlace(sample, restarts, place), record, TTL_S)


async def test_turns_committed_in_one_batch_are_judged_separately(store: Store) -> None:
    first, second = await held(store, 2)
    stranger = replace(second, fence=second.fence + 1)
    answers = await asyncio.gather(
        commit(store, first, 0, 0, 0, b"a"),
        commit(store, first, 0, 0, 1, b"b"),
        commit(store, first, 1, 0, 1, b"no turn before it"),
        commit(store, stranger, 0, 0, 0, b"late"),
        commit(store, second, 0, 1, 0, b"of a start that has not happened"),
        commit(store, second, 3, 0, 0, b"c"),
        return_exceptions=True,
    )
    assert isinstance(answers[2], OutOfOrder)
    assert [answer for answer in answers if not isinstance(answer, Exception)] == [True, True, False, False, True]
    assert await store.tickets.turns("0-0") == {0: (0, [b"a", b"b"])}
    assert await store.tickets.turns("0-1") == {3: (0, [b"c"])}


async def test_the_first_commit_of_a_turn_wins(store: Store) -> None:
    (one,) = await held(store)
    assert await commit(store, one, 0, 0, 0, b"first")
    assert await commit(store, one, 0, 0, 0, b"again")
    assert await store.tickets.turns("0-0") == {0: (0, [b"first"])}
    assert 0 < await store.client.ttl(store.keys.turns("0-0")) <= TTL_S


async def test_a_lost_ticket_can_neither_commit_nor_restart(store: Store) -> None:
    (one,) = await held(store, lease_s=0.0)
    assert await commit(store, one, 0, 0, 0, b"mine")
    (other,) = await claim(store, "environment-1", lease_s=0.0, rollouts=True)
    assert not await commit(store, one, 0, 0, 1, b"late")
    assert not await store.tickets.restart_rollout(POD, one, 0, 1, TTL_S)
    assert await commit(store, other, 0, 0, 1, b"theirs", "environment-1")
    assert await store.tickets.turns("0-0") == {0: (0, [b"mine", b"theirs"])}


async def test_a_restarted_rollout_drops_its_turns_and_rejects_late_ones(store: Store) -> None:
    (one,) = await held(store)
    for place in range(3):
        assert await commit(store, one, 0, 0, place, b"before")
        assert await commit(store, one, 1, 0, place, b"another's")
    for _ in range(2):  # repeating the call is harmless
        assert await store.tickets.restart_rollout(POD, one, 0, 1, TTL_S)
    assert not await commit(store, one, 0, 0, 3, b"late")
    assert await commit(store, one, 0, 1, 0, b"after")
    assert await store.tickets.restart_rollout(POD, one, 0, 2, TTL_S)
    assert not await store.tickets.restart_rollout(POD, one, 0, 1, TTL_S), "the restart is outdated"
    assert await commit(store, one, 0, 2, 0, b"after")
    assert await store.tickets.turns("0-0") == {0: (2, [b"after"]), 1: (0, [b"another's"] * 3)}


async def test_many_turns_share_few_requests(store: Store) -> None:
    claims = await held(store, 8)
    calls = (await store.client.info("commandstats")).get("cmdstat_fcall", {}).get("calls", 0)
    committed = await asyncio.gather(*(commit(store, claims[i % 8], i // 8, 0, 0, b"turn") for i in range(200)))
    assert all(committed)
    assert (await store.client.info("commandstats"))["cmdstat_fcall"]["calls"] - calls <= 5
